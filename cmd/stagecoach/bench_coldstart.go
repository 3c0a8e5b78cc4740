package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/onnx"
	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// startSize is a synthetic stage to be started.
type startSize struct {
	name        string
	bytes       int64
	forks, cold int // how often each way
}

// aliveReplicas is how many replicas share the zygote when the memory of each is measured.
const aliveReplicas = 8

// benchColdstart measures order → first output of replicas of synthetic ONNX stages, weights generated: forked by a
// KeysManager, as in production, and cold: a new process of the same binary with a stock session (all optimisations, no
// pre-packed file), its file in the page cache.
func benchColdstart(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench coldstart", flag.ContinueOnError)
	asJSON, images := reportFlags(fs)
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("coldstart", os.Stderr)
	for _, size := range []startSize{{"onnx_100MB", 100 << 20, 20, 10}, {"onnx_1GB", 1 << 30, 20, 5}} {
		if err := size.measure(ctx, report, *images, *ort); err != nil {
			return fmt.Errorf("%s: %w", size.name, err)
		}
	}
	return printReport(report, *asJSON, out)
}

// startBench starts replicas of one stage.
type startBench struct {
	width int
	root  string // of its image
	ort   string
	keys  *keysmanager.Manager
	own   *sandbox.Spawner
	n     int
}

func (s startSize) measure(ctx context.Context, report *bench.Report, images, ort string) error {
	dir, err := os.MkdirTemp("", "stagecoach-coldstart-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b, err := s.prepare(dir, images, ort)
	if err != nil {
		return err
	}
	defer b.keys.Close()
	defer b.own.Close()
	progress("bench coldstart: %s: loading the zygote, and pre-packing its weights", s.name)
	first, err := b.start(ctx, b.fork)
	if err != nil {
		return err
	}
	first.end()
	var fork, cold startSamples
	for i := range s.forks {
		if err := fork.add(ctx, b, b.fork); err != nil {
			return err
		}
		if (i+1)*s.cold/s.forks > i*s.cold/s.forks { // the cold ones are spread among the forks
			if err := cold.add(ctx, b, b.cold); err != nil {
				return err
			}
			progress("bench coldstart: %s: %d of %d forks, %d of %d cold starts", s.name, i+1, s.forks, len(cold.first), s.cold)
		}
	}
	fork.report(report, s.name+"_fork")
	cold.report(report, s.name+"_cold")
	f, okF := bench.Quantile(fork.first, 0.5)
	c, okC := bench.Quantile(cold.first, 0.5)
	if okF && okC {
		report.Add(s.name+"_fork", "speedup_over_cold", float64(c)/float64(f), len(cold.first))
	}
	extra, err := b.extra(ctx)
	if err != nil {
		return err
	}
	report.Add(s.name+"_fork", "extra_per_replica_mb", extra/1e6, aliveReplicas)
	return nil
}

// prepare writes the model and its image, and makes what starts replicas.
func (s startSize) prepare(dir, images, ort string) (*startBench, error) {
	if err := roomFor(dir, 4*s.bytes); err != nil {
		return nil, err
	}
	progress("bench coldstart: %s: generating weights", s.name)
	root := filepath.Join(dir, "images", "bench", "onnx", "1")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	shape := onnx.EncoderOf(s.bytes)
	if _, _, err := onnx.Synthetic(root, shape, 1); err != nil {
		return nil, err
	}
	stage, err := filepath.Abs(filepath.Join(images, "stagecoach", "onnx", "0.1.0", sandbox.Executable))
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(stage); err != nil {
		return nil, fmt.Errorf("%w: run make images", err)
	}
	if err := os.Symlink(stage, filepath.Join(root, sandbox.Executable)); err != nil {
		return nil, err
	}
	if ort, err = filepath.Abs(ort); err != nil {
		return nil, err
	}
	b := &startBench{width: shape.Width, root: root, ort: ort, own: sandbox.NewSpawner()}
	b.keys, err = keysmanager.New(keysmanager.Config{
		Node: "bench", Images: sandbox.Images{Dir: filepath.Join(dir, "images")}, ORT: ort, Cache: filepath.Join(dir, "cache"),
		Output: func(_, replica, _, line string) { progress("%s: %s", replica, line) },
		Log:    slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	})
	return b, err
}

func roomFor(dir string, bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	if free := int64(st.Bavail) * st.Bsize; free < bytes {
		return fmt.Errorf("%d MB free in %s, want %d: set TMPDIR to a folder with more room", free>>20, dir, bytes>>20)
	}
	return nil
}

// started is a replica that has answered its first call.
type started struct {
	hello, first time.Duration // since its order
	again        time.Duration // its second call, warm
	pid          int
	end          func()
}

// fork orders a replica from the KeysManager.
func (b *startBench) fork(ctx context.Context) (*net.UnixConn, int, func(), error) {
	b.n++
	name := fmt.Sprintf("fork-%d", b.n)
	r, err := b.keys.Start(ctx, keysmanager.Order{Replica: name, Spec: keysmanager.Spec{
		Function: "onnx.bench", Namespace: "bench", Image: "bench/onnx:1", Env: map[string]string{wire.EnvModel: "model.onnx"},
	}})
	if err != nil {
		return nil, 0, nil, err
	}
	return r.Conn, r.PID, func() { _ = b.keys.Stop(context.WithoutCancel(ctx), name, time.Second) }, nil
}

// cold starts a process of its own.
func (b *startBench) cold(context.Context) (*net.UnixConn, int, func(), error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	cmd, err := b.own.Start(sandbox.Command{
		Dir: b.root, Files: []*os.File{theirs}, Stdout: os.Stderr, Stderr: os.Stderr,
		Env: map[string]string{wire.EnvStageFD: "3", wire.EnvModel: "model.onnx", wire.EnvORT: b.ort, "ORT_DISABLE_TELEMETRY": "1"},
	})
	if err != nil {
		return nil, 0, nil, err
	}
	end := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	c, err := net.FileConn(ours)
	if err != nil {
		end()
		return nil, 0, nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		end()
		return nil, 0, nil, fmt.Errorf("stage socket is a %T", c)
	}
	return conn, cmd.Process.Pid, end, nil
}

// start orders a replica and makes it do two calls, as a dispatcher does.
func (b *startBench) start(ctx context.Context, how func(context.Context) (*net.UnixConn, int, func(), error)) (started, error) {
	order := time.Now()
	raw, pid, end, err := how(ctx)
	if err != nil {
		return started{}, err
	}
	conn := wire.NewConn(raw)
	s := started{pid: pid, end: func() { _ = conn.Close(); end() }}
	err = func() error {
		if err := conn.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			return err
		}
		if err := expect(conn, wire.FrameHello); err != nil {
			return err
		}
		s.hello = time.Since(order)
		if err := conn.Write(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: wire.Version}.Append(nil)}); err != nil {
			return err
		}
		if err := b.call(conn, 1); err != nil {
			return err
		}
		s.first = time.Since(order)
		begin := time.Now()
		err := b.call(conn, 2)
		s.again = time.Since(begin)
		return err
	}()
	if err != nil {
		s.end()
		return started{}, err
	}
	return s, nil
}

// sequence is how many positions the input of a call has.
const sequence = 16

func (b *startBench) call(conn *wire.Conn, batch uint64) error {
	n := sequence * b.width
	data := make([]byte, 0, 4*n)
	for i := range n {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(i*2654435761%1000)/500-1))
	}
	in := tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, sequence, int64(b.width)}, Data: data}
	payload := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Tensors: []tensor.Tensor{in}}}}}}}}.Append(nil)
	if err := conn.Write(wire.Frame{Type: wire.FrameBatch, Batch: batch, Payload: payload}); err != nil {
		return err
	}
	return expect(conn, wire.FrameResult)
}

func expect(conn *wire.Conn, want wire.FrameType) error {
	f, err := conn.Read()
	if err != nil {
		return fmt.Errorf("waiting for %v: %w", want, err)
	}
	for _, file := range f.Files {
		_ = file.Close()
	}
	if f.Type != want {
		return fmt.Errorf("frame %v (%.200q), want %v", f.Type, f.Payload, want)
	}
	return nil
}

// startSamples is what several starts took.
type startSamples struct{ hello, first, again []time.Duration }

func (s *startSamples) add(ctx context.Context, b *startBench, how func(context.Context) (*net.UnixConn, int, func(), error)) error {
	r, err := b.start(ctx, how)
	if err != nil {
		return err
	}
	r.end()
	s.hello, s.first, s.again = append(s.hello, r.hello), append(s.first, r.first), append(s.again, r.again)
	return nil
}

func (s *startSamples) report(r *bench.Report, name string) {
	r.AddMillis(name, "first_output_p50_ms", s.first, 0.5)
	r.AddMillis(name, "hello_p50_ms", s.hello, 0.5)
	r.AddMillis(name, "inference_p50_ms", s.again, 0.5)
}

// extra returns what each of several live replicas adds to the memory in bytes: (ΣPSS of zygote and replicas − PSS of the
// zygote alone) / replicas.
func (b *startBench) extra(ctx context.Context) (float64, error) {
	zygotes := b.keys.Inventory().Zygotes
	if len(zygotes) != 1 {
		return 0, fmt.Errorf("%d zygotes, want one", len(zygotes))
	}
	alone, err := sandbox.PSS(zygotes[0].PID)
	if err != nil {
		return 0, err
	}
	pids := []int{zygotes[0].PID}
	for range aliveReplicas {
		r, err := b.start(ctx, b.fork)
		if err != nil {
			return 0, err
		}
		defer r.end()
		pids = append(pids, r.pid)
	}
	sum, err := sandbox.PSS(pids...)
	if err != nil {
		return 0, err
	}
	return float64(sum-alone) / aliveReplicas, nil
}
