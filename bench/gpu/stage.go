package gpu

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/functions/torch"
	"github.com/stagecoach-serving/stagecoach/functions/torch/synthetic"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

//go:embed heap.py
var heapPython []byte

const (
	lacksAll  = "without accounts, cgroups, networks"
	modelFile = "model.safetensors"
	heapImage = "bench/heap:1" // of the stage with parameters in the heap
)

// size measures what a turn has for a stage with parameters of a size.
func (g *gpuBench) size(ctx context.Context, s gpuSize, turn int) {
	if turn == turnGoals {
		g.cells.run(ctx, gpuCell{
			name: s.name + "_pinned", takes: g.times.of(1, 1, 3, s.bytes), device: s.bytes + gpuContext, host: hostBase,
			measure: func(ctx context.Context) error { return g.pinnedCopy(ctx, s) },
		})
	}
	ways := g.ways(s, turn)
	if ring := s.name + "_ring"; len(ways) == 0 && (turn != turnGoals || g.cells.before[ring]) {
		return
	}
	b := g.weighted(ctx, s)
	if b == nil {
		return
	}
	if turn == turnGoals {
		g.cells.run(ctx, gpuCell{
			name: s.name + "_ring", takes: g.times.of(1, 1, 3, s.bytes), device: gpuNeed(s), host: s.bytes + hostBase,
			measure: func(ctx context.Context) error { return g.ring(ctx, b, s) },
		})
	}
	g.starts(ctx, b, ways, turn == turnBare)
}

// weighted returns the stage of a size. The first call for a size makes the stage's weights.
// weighted returns nil if that failed or was skipped; the first call then reports it.
func (g *gpuBench) weighted(ctx context.Context, s gpuSize) *starts.Stage {
	b, asked := g.stages[s.name]
	if asked {
		return b
	}
	weights := gpuCell{name: s.name + weightsCell, takes: g.times.of(2, 1, 6, s.bytes), host: s.bytes + hostBase}
	weights.device = s.bytes + gpuContext // none are made that the device cannot hold
	weights.measure = func(ctx context.Context) (err error) {
		b, err = g.stage(ctx, s)
		return err
	}
	g.cells.run(ctx, weights)
	g.stages[s.name] = b
	if b == nil {
		for _, p := range append([]string{"ring"}, g.paths...) {
			g.cells.skip(s.name+"_"+p, "there are no weights, see "+s.name+weightsCell)
		}
	}
	return b
}

// stage builds the images of a transformer with about s.bytes of parameters. If starts by hand are
// measured, it also saves the model with torch.save. With --weights, it uses files that are already
// in that folder.
func (g *gpuBench) stage(ctx context.Context, s gpuSize) (*starts.Stage, error) {
	shape, err := synthetic.Of(1, s.bytes, g.at.Dtype)
	if err != nil {
		return nil, err
	}
	if g.weights != "" {
		err := os.MkdirAll(g.weights, 0o755) //nolint:gosec // stages are users of their own
		if err != nil {
			return nil, err
		}
	}
	return starts.NewStageIn(g.machine, g.weights, func(b *starts.Stage) error {
		b.Process = g.py.Process()
		b.Env = map[string]string{wire.EnvRuntime: "python", wire.EnvModel: modelFile}
		b.Input, b.Reads = tensor.Item{ContentType: "text/plain", Bytes: []byte(starts.TorchText)}, starts.NextByte
		handler := map[string][]byte{"handler.py": torch.TransformerHandler}
		if err := starts.BuildTorch(ctx, b, starts.Image, handler); err != nil {
			return err
		}
		if err := starts.BuildTorch(ctx, b, heapImage, map[string][]byte{"handler.py": heapPython, "transformer.py": torch.TransformerHandler}); err != nil {
			return err
		}
		files := filepath.Join(b.Dir, "weights")
		if g.weights != "" {
			files = filepath.Join(g.weights, fmt.Sprintf("%s-%s", s.name, g.at.Dtype))
		}
		p := &starts.Plain{Py: g.py, Dir: b.Dir, Root: b.Root, At: g.at.Device}
		b.Others = map[string]starts.Starter{"plain": p.Start}
		return g.generate(ctx, b, p, shape, files)
	})
}

// generate writes the weights into a folder, unless the folder has them, and links them into the
// images.
func (g *gpuBench) generate(ctx context.Context, b *starts.Stage, p *starts.Plain, shape synthetic.Transformer, files string) error {
	if err := os.MkdirAll(files, 0o755); err != nil { //nolint:gosec // stages are users of their own
		return err
	}
	weights, saved := filepath.Join(files, "1.safetensors"), filepath.Join(files, "model.pt")
	copies := map[string]string{filepath.Join(b.Root, modelFile): weights, filepath.Join(b.Images.Dir, "bench", "heap", "1", modelFile): weights}
	byHand := slices.Contains(g.paths, "plain")
	want := shape.Bytes(0)
	missing := int64(0)
	for _, file := range []string{weights, saved} {
		if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) && (file == weights || byHand) {
			missing += want + want/50
		}
	}
	if err := starts.RoomFor(files, missing); err != nil {
		return err
	}
	if err := shape.Write(ctx, files, 1, func(string, int64) {}); err != nil {
		return err
	}
	for to, from := range copies {
		if err := os.Link(from, to); err != nil {
			return err
		}
	}
	if !byHand {
		return nil
	}
	if _, err := os.Stat(saved); err != nil {
		if err := p.Pack(ctx); err != nil {
			return err
		}
		return os.Link(p.Model(), saved)
	}
	if err := p.Write(); err != nil {
		return err
	}
	return os.Link(saved, p.Model())
}

// manage makes a KeysManager for the stage. It has users, networks and cgroups as in the product,
// unless bare is set. lacks names those of the three that the machine does not have.
func (g *gpuBench) manage(b *starts.Stage, bare bool) (lacks string, err error) {
	var cfg keysmanager.Config
	if !bare {
		var said bytes.Buffer
		log := slog.New(slog.NewTextHandler(&said, nil))
		if cfg, err = b.Isolate(log); err != nil {
			console.Progress("bench gpu: %s", strings.TrimSpace(said.String()))
			b.Shut()
			return "", err
		}
		var without []string
		for name, has := range map[string]bool{"accounts": cfg.Accounts != nil, "cgroups": cfg.Groups != nil, "networks": cfg.Networks != nil} {
			if !has {
				without = append(without, name)
			}
		}
		if slices.Sort(without); len(without) > 0 {
			lacks = "without " + strings.Join(without, ", ")
			console.Progress("bench gpu: %s: %s", lacks, strings.TrimSpace(said.String()))
		}
	}
	cfg.Devices = g.at.all
	return lacks, b.Open(cfg)
}

// deviceLine parses a replica's log line about the copy of its parameters to its device. ok is
// false for all other lines.
func deviceLine(line string) (p starts.DeviceParts, ok bool) {
	_, said, ok := strings.Cut(line, " has its parameters: ")
	if !ok {
		return p, false
	}
	for part := range strings.SplitSeq(said, ", ") {
		words := strings.Fields(part)
		number := func(i int) time.Duration {
			if i >= len(words) {
				return 0
			}
			v, _ := strconv.ParseFloat(words[i], 64) // 0 if the line has another form
			return starts.Seconds(v)
		}
		switch {
		case strings.HasPrefix(part, "context "):
			p.Context = number(1)
		case strings.Contains(part, " copied in "):
			p.Copied = number(4)
		case strings.HasPrefix(part, "first kernels "):
			p.Kernels = number(2)
		}
	}
	return p, true
}
