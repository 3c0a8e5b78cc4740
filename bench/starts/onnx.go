package starts

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

// NewONNXStage writes a model of about this many bytes, and its image. The caller closes it.
func NewONNXStage(m Machine, bytes int64, images, ort string) (*Stage, error) {
	return newStage(m, func(b *Stage) error {
		if err := RoomFor(b.Dir, 4*bytes); err != nil {
			return err
		}
		if err := os.MkdirAll(b.Root, 0o755); err != nil {
			return err
		}
		shape := onnx.EncoderOf(bytes)
		if _, _, err := onnx.Synthetic(b.Root, shape, 1); err != nil {
			return err
		}
		stage, err := filepath.Abs(filepath.Join(images, "stagecoach", "onnx", "0.1.0", sandbox.Executable))
		if err != nil {
			return err
		}
		program, err := os.ReadFile(stage)
		if err != nil {
			return fmt.Errorf("%w: run make images", err)
		}
		stage = filepath.Join(b.Root, sandbox.Executable)
		if err := os.WriteFile(stage, program, 0o755); err != nil { //nolint:gosec // a program
			return err
		}
		b.Env = map[string]string{wire.EnvModel: "model.onnx"}
		b.Input = tensor.Item{Tensors: []tensor.Tensor{positions(shape.Width)}}
		b.Others = map[string]Starter{
			"coldprepacked": func(ctx context.Context) (Started, error) { return b.Start(ctx, b.prepacked) },
			"colddisk":      func(ctx context.Context) (Started, error) { return b.Start(ctx, b.fromDisk) },
		}
		b.Ort, err = filepath.Abs(ort)
		return err
	})
}

// sequence is how many positions the input of a call has.
const sequence = 16

// positions returns the input of a call.
func positions(width int) tensor.Tensor {
	n := sequence * width
	data := make([]byte, 0, 4*n)
	for i := range n {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(i*2654435761%1000)/500-1))
	}
	return tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, sequence, int64(width)}, Data: data}
}

// prepacked starts a process of its own with the weights that a zygote has pre-packed.
func (b *Stage) prepacked(ctx context.Context) (Launched, error) {
	image, err := b.Images.Resolve(Image)
	if err != nil {
		return Launched{}, err
	}
	folder := filepath.Join(b.cache(), image.Digest+"-*") // of its only model
	if b.users {
		folder = filepath.Join(folder, Namespace) // which has its own
	}
	found, err := filepath.Glob(folder)
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("folders %q of packed parameters %q, want one", folder, found)
	}
	if err != nil {
		return Launched{}, err
	}
	return b.spawn(ctx, found[0])
}

// fromDisk starts a process of its own whose files are not in memory.
func (b *Stage) fromDisk(ctx context.Context) (Launched, error) {
	if err := forget(b.Root); err != nil {
		return Launched{}, err
	}
	return b.spawn(ctx, "")
}

// forget drops the files of a folder from the page cache.
func forget(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range files {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		if err = f.Sync(); err == nil { // what is not on disk is not dropped
			err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		}
		_ = f.Close()
		if err != nil {
			return fmt.Errorf("page cache of %s: %w", e.Name(), err)
		}
	}
	return nil
}

// spawn starts a process of its own.
func (b *Stage) spawn(ctx context.Context, prepacked string) (Launched, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return Launched{}, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	cmd, err := b.own.Start(ctx, sandbox.Command{
		Dir: b.Root, Files: []*os.File{theirs}, Stdout: os.Stderr, Stderr: os.Stderr,
		Env: map[string]string{
			wire.EnvStageFD: "3", wire.EnvModel: "model.onnx", wire.EnvORT: b.Ort, wire.EnvPrepacked: prepacked, "ORT_DISABLE_TELEMETRY": "1",
		},
	})
	if err != nil {
		return Launched{}, err
	}
	end := func() { endProcess(cmd) }
	conn, err := wire.OpenSocket(ours)
	if err != nil {
		end()
		return Launched{}, err
	}
	return Launched{conn, cmd.PID(), "", nil, end}, nil
}

func endProcess(cmd sandbox.Process) {
	_ = cmd.Signal(syscall.SIGKILL)
	cmd.Wait()
}
