package main

import (
	"bufio"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/functions/torch"
	"github.com/stagecoach-serving/stagecoach/functions/torch/synthetic"
	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/builder"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// torchPython is an interpreter with PyTorch.
type torchPython struct {
	Program string `json:"program"` // absolute
	Python  string `json:"python"`  // versions
	Torch   string `json:"torch"`
	CUDA    string `json:"cuda"` // that PyTorch is made for; empty: for none
}

// findTorch finds an interpreter with PyTorch, and with CUDA if that is wanted: the one that was named, else the first that has it.
func findTorch(ctx context.Context, named string, cuda bool) (torchPython, error) {
	candidates := interpreters()
	if named != "" {
		candidates = []string{named}
	}
	const code = `import json, platform, sys, numpy, torch
if "cuda" in sys.argv and not torch.cuda.is_available():
    sys.exit("its PyTorch " + torch.__version__ + " finds no CUDA device")
print(json.dumps({"program": sys.executable, "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or ""}))`
	args, what := []string{"-c", code}, "PyTorch"
	if cuda {
		args, what = append(args, "cuda"), "PyTorch that finds a CUDA device"
	}
	var faults []string
	for _, name := range candidates {
		out, err := output(ctx, name, args...)
		if err != nil {
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
				err = fmt.Errorf("%w: %s", err, lines[len(lines)-1])
			}
			faults = append(faults, fmt.Sprintf("%s: %v", name, err))
			continue
		}
		var py torchPython
		if err := json.Unmarshal(out, &py); err != nil {
			return torchPython{}, fmt.Errorf("%s printed %q: %w", name, out, err)
		}
		return py, nil
	}
	return torchPython{}, fmt.Errorf("no interpreter with %s: install it (Debian: apt-get install python3-torch python3-numpy; with CUDA: pip install torch) or name another with --python (%s)",
		what, strings.Join(faults, "; "))
}

// tell has a report say what was measured with.
func (p torchPython) tell(r *bench.Report) { r.With("python", p.Python); r.With("torch", p.Torch) }

// process is the env fprocess of stages that it runs, with what of our environment it may find its modules and libraries by.
func (p torchPython) process() string {
	words := []string{}
	for _, name := range []string{"PYTHONPATH", "LD_LIBRARY_PATH"} {
		if v := os.Getenv(name); v != "" && len(strings.Fields(v)) == 1 {
			words = append(words, name+"="+v)
		}
	}
	if len(words) > 0 {
		words = append([]string{"/usr/bin/env"}, words...)
	}
	return strings.Join(append(words, p.Program, "./stage"), " ")
}

// torchText is what a call of a stage in PyTorch brings: as many positions as one of an ONNX stage.
const torchText = "to be, or not to"

// torchDevice is where stages compute.
type torchDevice struct {
	name  string            // as PyTorch has it: cpu or cuda:0
	id    string            // UUID, for CUDA_VISIBLE_DEVICES
	dtype safetensors.Dtype // of parameters
}

var onCPU = torchDevice{name: "cpu", id: "none", dtype: "F32"}

// newTorchStage builds the image of a transformer with parameters of about so many bytes, and saves the same model as torch.save
// does, for those who load it by hand. The caller closes it.
func newTorchStage(ctx context.Context, m machine, py torchPython, bytes int64, at torchDevice) (*benchStage, error) {
	shape, err := synthetic.Of(1, bytes, at.dtype)
	if err != nil {
		return nil, err
	}
	return newBenchStage(m, func(b *benchStage) error {
		if err := roomFor(b.dir, 2*bytes+bytes/8); err != nil {
			return err
		}
		b.process = py.process()
		if err := buildTorch(ctx, b, benchImage, map[string][]byte{"handler.py": torch.TransformerHandler}); err != nil {
			return err
		}
		if err := shape.Write(ctx, b.root, 1, func(string, int64) {}); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(b.root, "1.safetensors"), filepath.Join(b.root, "model.safetensors")); err != nil {
			return err
		}
		b.env = map[string]string{wire.EnvRuntime: "python", wire.EnvModel: "model.safetensors"}
		b.input = tensor.Item{ContentType: "text/plain", Bytes: []byte(torchText)}
		b.reads = nextByte
		p := &plain{py: py, dir: b.dir, root: b.root, at: at}
		b.others = map[string]starter{"plain": p.start}
		return p.pack(ctx)
	})
}

// nextByte reads which byte a transformer says is the most likely to come next.
func nextByte(answer []byte) string {
	var said struct{ Next []struct{ Byte int } }
	if err := json.Unmarshal(answer, &said); err != nil || len(said.Next) == 0 {
		return fmt.Sprintf("%.200q, want bytes that come next", answer)
	}
	return strconv.Itoa(said.Next[0].Byte)
}

// buildTorch makes an image of a stage, named ref, with these files beside its handler, without its parameters,
// as `stagecoach build -folder` does.
func buildTorch(ctx context.Context, b *benchStage, ref string, files map[string][]byte) error {
	handler, err := os.MkdirTemp(b.dir, "handler-")
	if err != nil {
		return err
	}
	for file, content := range files {
		if err := os.WriteFile(filepath.Join(handler, file), content, 0o644); err != nil { //nolint:gosec // stages are users of their own
			return err
		}
	}
	name := "bench"
	store, err := image.OpenStore(image.Folder(b.images.Dir))
	if err != nil {
		return err
	}
	defer store.Close()
	builds, err := builder.New(ctx, &stack.File{Functions: map[string]stack.Function{name: {Lang: "python3-stage", Handler: handler, FProcess: b.process}}}, store)
	if err != nil {
		return err
	}
	defer builds.Close()
	r, err := builds.Build(ctx, name)
	if err != nil {
		return err
	}
	return builder.PutFolder(b.images.Dir, ref, r.Dir)
}

//go:embed plain.py
var plainPython []byte

// plain loads and runs a stage's model by hand, without Stagecoach.
type plain struct {
	py        torchPython
	dir, root string // for its files; the stage's image
	at        torchDevice
}

func (p *plain) script() string { return filepath.Join(p.dir, "plain.py") }
func (p *plain) model() string  { return filepath.Join(p.dir, "model.pt") }

func (p *plain) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.py.Program, append([]string{p.script()}, args...)...)
	cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+p.at.id, "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func (p *plain) write() error { return os.WriteFile(p.script(), plainPython, 0o600) }

// pack saves the model as torch.save does.
func (p *plain) pack(ctx context.Context) error {
	if err := p.write(); err != nil {
		return err
	}
	if out, err := p.command(ctx, "pack", p.root, filepath.Join(p.root, "model.safetensors"), p.model()).Output(); err != nil {
		return fmt.Errorf("torch.save of the model: %w: %s", err, out)
	}
	return nil
}

// start starts a process, and returns when it has done its second call. The process stays until its
// end is called.
func (p *plain) start(ctx context.Context) (started, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	begin := time.Now()
	cmd := p.command(ctx, "run", p.root, p.model(), p.at.name, torchText)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		cancel()
		return started{}, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		cancel()
		return started{}, err
	}
	if err := cmd.Start(); err != nil {
		cancel()
		return started{}, err
	}
	lines := bufio.NewReader(stdout)
	line, err := lines.ReadString('\n')
	s := started{first: time.Since(begin), launched: launched{pid: cmd.Process.Pid}}
	end := sync.OnceValue(func() error {
		defer cancel()
		_ = stdin.Close() // it may have ended
		_, drained := io.Copy(io.Discard, lines)
		return errors.Join(cmd.Wait(), drained)
	})
	s.end = func() { _ = end() } // it has answered: how it ends is of no interest
	var said struct {
		Next                                        int     // the byte that is most likely to come next
		Import, Context, Load, Copy, Kernels, Again float64 // seconds
	}
	if err == nil {
		err = json.Unmarshal([]byte(line), &said)
	}
	if err == nil {
		line, err = lines.ReadString('\n')
	}
	if err == nil {
		err = json.Unmarshal([]byte(line), &said)
	}
	if err != nil {
		return started{}, fmt.Errorf("torch.load by hand: %w", cmp.Or(end(), err))
	}
	s.load, s.again = seconds(said.Load), seconds(said.Again)
	s.parts = deviceParts{imports: seconds(said.Import), context: seconds(said.Context), copied: seconds(said.Copy), kernels: seconds(said.Kernels)}
	s.said = strconv.Itoa(said.Next)
	return s, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * 1e9) }
