package starts

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

// Python is an interpreter with PyTorch.
type Python struct {
	Program string `json:"program"` // absolute
	Python  string `json:"python"`  // versions
	Torch   string `json:"torch"`
	CUDA    string `json:"cuda"` // that PyTorch is made for; empty: for none
}

// FindTorch finds an interpreter with PyTorch, and with CUDA if that is wanted. If an interpreter
// is named, FindTorch tries only this one. Otherwise it tries all interpreters of the machine.
func FindTorch(ctx context.Context, named string, cuda bool) (Python, error) {
	candidates := Interpreters()
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
		out, err := Output(ctx, name, args...)
		if err != nil {
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
				err = fmt.Errorf("%w: %s", err, lines[len(lines)-1])
			}
			faults = append(faults, fmt.Sprintf("%s: %v", name, err))
			continue
		}
		var py Python
		if err := json.Unmarshal(out, &py); err != nil {
			return Python{}, fmt.Errorf("%s printed %q: %w", name, out, err)
		}
		return py, nil
	}
	return Python{}, fmt.Errorf("no interpreter with %s: install it (Debian: apt-get install python3-torch python3-numpy; with CUDA: pip install torch) or name another with --python (%s)",
		what, strings.Join(faults, "; "))
}

// Tell adds the versions of Python and PyTorch to a report.
func (p Python) Tell(r *bench.Report) { r.With("python", p.Python); r.With("torch", p.Torch) }

// Process returns the value of fprocess for stages that run with this interpreter. It includes
// those variables of our environment that help the interpreter find its modules and libraries.
func (p Python) Process() string {
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

// TorchText is the input of a call of a stage in PyTorch. It has as many positions as the input of
// an ONNX stage.
const TorchText = "to be, or not to"

// Device is where stages compute.
type Device struct {
	Name  string            // as PyTorch has it: cpu or cuda:0
	ID    string            // UUID, for CUDA_VISIBLE_DEVICES
	Dtype safetensors.Dtype // of parameters
}

// OnCPU is the device of stages that compute on the CPU.
var OnCPU = Device{Name: "cpu", ID: "none", Dtype: "F32"}

// NewTorchStage builds the image of a transformer with parameters of about this many bytes. It also
// saves the same model with torch.save, for starts by hand. The caller closes it.
func NewTorchStage(ctx context.Context, m Machine, py Python, bytes int64, at Device) (*Stage, error) {
	shape, err := synthetic.Of(1, bytes, at.Dtype)
	if err != nil {
		return nil, err
	}
	return newStage(m, func(b *Stage) error {
		if err := RoomFor(b.Dir, 2*bytes+bytes/8); err != nil {
			return err
		}
		b.Process = py.Process()
		if err := BuildTorch(ctx, b, Image, map[string][]byte{"handler.py": torch.TransformerHandler}); err != nil {
			return err
		}
		if err := shape.Write(ctx, b.Root, 1, func(string, int64) {}); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(b.Root, "1.safetensors"), filepath.Join(b.Root, "model.safetensors")); err != nil {
			return err
		}
		b.Env = map[string]string{wire.EnvRuntime: "python", wire.EnvModel: "model.safetensors"}
		b.Input = tensor.Item{ContentType: "text/plain", Bytes: []byte(TorchText)}
		b.Reads = NextByte
		p := &Plain{Py: py, Dir: b.Dir, Root: b.Root, At: at}
		b.Others = map[string]Starter{"plain": p.Start}
		return p.Pack(ctx)
	})
}

// NextByte reads from a transformer's answer which byte is the most likely to come next.
func NextByte(answer []byte) string {
	var said struct{ Next []struct{ Byte int } }
	if err := json.Unmarshal(answer, &said); err != nil || len(said.Next) == 0 {
		return fmt.Sprintf("%.200q, want bytes that come next", answer)
	}
	return strconv.Itoa(said.Next[0].Byte)
}

// BuildTorch builds the image ref of a stage as `stagecoach build -folder` does, with the given
// files in the handler's folder. The image has no parameters yet.
func BuildTorch(ctx context.Context, b *Stage, ref string, files map[string][]byte) error {
	handler, err := os.MkdirTemp(b.Dir, "handler-")
	if err != nil {
		return err
	}
	for file, content := range files {
		name := filepath.Join(handler, file)
		if err := os.WriteFile(name, content, 0o644); err != nil { //nolint:gosec // for stages' users
			return err
		}
	}
	name := "bench"
	store, err := image.OpenStore(image.Folder(b.Images.Dir))
	if err != nil {
		return err
	}
	defer store.Close()
	builds, err := builder.New(ctx, &stack.File{Functions: map[string]stack.Function{name: {Lang: "python3-stage", Handler: handler, FProcess: b.Process}}}, store)
	if err != nil {
		return err
	}
	defer builds.Close()
	r, err := builds.Build(ctx, name)
	if err != nil {
		return err
	}
	return builder.PutFolder(b.Images.Dir, ref, r.Dir)
}

//go:embed plain.py
var plainPython []byte

// Plain loads and runs a stage's model by hand, without Stagecoach.
type Plain struct {
	Py        Python
	Dir, Root string // for its files; the stage's image
	At        Device
}

func (p *Plain) script() string { return filepath.Join(p.Dir, "plain.py") }

// Model returns the file that Pack writes.
func (p *Plain) Model() string { return filepath.Join(p.Dir, "model.pt") }

func (p *Plain) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.Py.Program, append([]string{p.script()}, args...)...)
	cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+p.At.ID, "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// Write writes the script.
func (p *Plain) Write() error { return os.WriteFile(p.script(), plainPython, 0o600) }

// Pack saves the model as torch.save does.
func (p *Plain) Pack(ctx context.Context) error {
	if err := p.Write(); err != nil {
		return err
	}
	if out, err := p.command(ctx, "pack", p.Root, filepath.Join(p.Root, "model.safetensors"), p.Model()).Output(); err != nil {
		return fmt.Errorf("torch.save of the model: %w: %s", err, out)
	}
	return nil
}

// Start starts a process by hand. It returns after the process has answered two calls. The process
// runs until the caller ends it.
func (p *Plain) Start(ctx context.Context) (Started, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	begin := time.Now()
	cmd := p.command(ctx, "run", p.Root, p.Model(), p.At.Name, TorchText)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		cancel()
		return Started{}, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		cancel()
		return Started{}, err
	}
	if err := cmd.Start(); err != nil {
		cancel()
		return Started{}, err
	}
	lines := bufio.NewReader(stdout)
	line, err := lines.ReadString('\n')
	s := Started{first: time.Since(begin), Launched: Launched{PID: cmd.Process.Pid}}
	end := sync.OnceValue(func() error {
		defer cancel()
		_ = stdin.Close() // it may have ended
		_, drained := io.Copy(io.Discard, lines)
		return errors.Join(cmd.Wait(), drained)
	})
	s.End = func() { _ = end() } // it has answered: how it ends is of no interest
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
		return Started{}, fmt.Errorf("torch.load by hand: %w", cmp.Or(end(), err))
	}
	s.load, s.again = Seconds(said.Load), Seconds(said.Again)
	s.Parts = DeviceParts{Imports: Seconds(said.Import), Context: Seconds(said.Context), Copied: Seconds(said.Copy), Kernels: Seconds(said.Kernels)}
	s.said = strconv.Itoa(said.Next)
	return s, nil
}

// Seconds returns a duration of this many seconds.
func Seconds(s float64) time.Duration { return time.Duration(s * 1e9) }
