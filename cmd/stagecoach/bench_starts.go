package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/onnx"
	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// benchStage is a synthetic ONNX stage, weights generated, and a KeysManager that starts replicas of it.
type benchStage struct {
	dir    string // all of it
	root   string // of its image
	cache  string // folder of its pre-packed weights
	width  int    // of its input
	ort    string
	images sandbox.Images
	keys   *keysmanager.Manager
	users  accounts
	done   func() // with its cgroups
	own    *sandbox.Spawner
	n      int // replicas so far
}

// benchImage is the name of its image, benchNamespace that of its functions.
const (
	benchImage     = "bench/onnx:1"
	benchNamespace = "bench"
)

// newBenchStage writes a model of about so many bytes, and its image, into a folder of its own. The caller closes it.
func newBenchStage(bytes int64, images, ort string) (*benchStage, error) {
	dir, err := os.MkdirTemp("", "stagecoach-bench-")
	if err != nil {
		return nil, err
	}
	b := &benchStage{dir: dir, root: filepath.Join(dir, "images", "bench", "onnx", "1"), images: sandbox.Images{Dir: filepath.Join(dir, "images")}}
	if err := b.prepare(bytes, images, ort); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	b.own = sandbox.NewSpawner()
	return b, nil
}

func (b *benchStage) prepare(bytes int64, images, ort string) (err error) {
	if err := roomFor(b.dir, 4*bytes); err != nil {
		return err
	}
	if err := os.MkdirAll(b.root, 0o755); err != nil {
		return err
	}
	shape := onnx.EncoderOf(bytes)
	if _, _, err := onnx.Synthetic(b.root, shape, 1); err != nil {
		return err
	}
	b.width = shape.Width
	stage, err := filepath.Abs(filepath.Join(images, "stagecoach", "onnx", "0.1.0", sandbox.Executable))
	if err != nil {
		return err
	}
	program, err := os.ReadFile(stage)
	if err != nil {
		return fmt.Errorf("%w: run make images", err)
	}
	if err := os.WriteFile(filepath.Join(b.root, sandbox.Executable), program, 0o755); err != nil { //nolint:gosec // a program
		return err
	}
	if err := os.Chmod(b.dir, 0o755); err != nil { //nolint:gosec // stages are users of their own
		return err
	}
	b.ort, err = filepath.Abs(ort)
	return err
}

// manage makes the KeysManager, with users and cgroups as the product has them, once the page cache is as it should be.
func (b *benchStage) manage() (err error) {
	cache := filepath.Join(b.dir, "cache")
	image, err := b.images.Resolve(benchImage)
	if err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	if b.users, err = openAccounts(sandbox.DefaultRange.String(), log); err != nil {
		return err
	}
	var groups keysmanager.Groups
	groups, b.done = openGroups("bench", b.dir, log)
	b.cache = filepath.Join(cache, image.Digest+"-*") // of its only model
	if b.users.open != nil {
		b.cache = filepath.Join(b.cache, benchNamespace) // which has its own
	}
	b.keys, err = keysmanager.New(keysmanager.Config{
		Node: "bench", Images: b.images, ORT: b.ort, Cache: cache, Accounts: b.users.forKeys(), Groups: groups,
		Output: func(_, replica, _, line string) {
			if !strings.Contains(replica, atOnce) { // those are given up as soon as they are there, and say so
				progress("%s: %s", replica, line)
			}
		},
		Log: log, Metrics: prometheus.NewRegistry(),
	})
	return err
}

func (b *benchStage) close() {
	if b.keys != nil {
		b.keys.Close()
	}
	if b.done != nil {
		b.done()
	}
	_ = b.users.close() // nobody has one any more
	b.own.Close()
	_ = os.RemoveAll(b.dir) // a temporary folder
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

// launched is a replica whose process runs.
type launched struct {
	conn   *net.UnixConn
	pid    int
	phases []keysmanager.Phase
	end    func() // ends it and waits
}

// spec is what the KeysManager knows of the stage, on a start path.
func (b *benchStage) spec(path string) keysmanager.Spec {
	return keysmanager.Spec{
		Function: path + "." + benchNamespace, Namespace: benchNamespace, Image: benchImage, Env: map[string]string{wire.EnvModel: "model.onnx"}, Start: path,
	}
}

// order returns what orders a replica from the KeysManager on a path.
func (b *benchStage) order(path string) func(context.Context) (launched, error) {
	return func(ctx context.Context) (launched, error) {
		b.n++
		name := fmt.Sprintf("%s-%d", path, b.n)
		r, err := b.keys.Start(ctx, keysmanager.Order{Replica: name, Spec: b.spec(path)})
		if err != nil {
			return launched{}, err
		}
		return launched{r.Conn, r.PID, r.Phases, func() { _ = b.keys.Stop(context.WithoutCancel(ctx), name, 10*time.Second) }}, nil
	}
}

// prepacked starts a process of its own over the weights that a zygote has pre-packed.
func (b *benchStage) prepacked(context.Context) (launched, error) {
	found, err := filepath.Glob(b.cache)
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("folders %q of packed parameters %q, want one", b.cache, found)
	}
	if err != nil {
		return launched{}, err
	}
	return b.process(found[0])
}

// fromDisk starts a process of its own whose files are not in memory.
func (b *benchStage) fromDisk(context.Context) (launched, error) {
	if err := forget(b.root); err != nil {
		return launched{}, err
	}
	return b.process("")
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

// process starts a process of its own.
func (b *benchStage) process(prepacked string) (launched, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return launched{}, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	cmd, err := b.own.Start(sandbox.Command{
		Dir: b.root, Files: []*os.File{theirs}, Stdout: os.Stderr, Stderr: os.Stderr,
		Env: map[string]string{
			wire.EnvStageFD: "3", wire.EnvModel: "model.onnx", wire.EnvORT: b.ort, wire.EnvPrepacked: prepacked, "ORT_DISABLE_TELEMETRY": "1",
		},
	})
	if err != nil {
		return launched{}, err
	}
	end := func() { endProcess(cmd) }
	c, err := net.FileConn(ours)
	if err != nil {
		end()
		return launched{}, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		end()
		return launched{}, fmt.Errorf("stage socket is a %T", c)
	}
	return launched{conn, cmd.Process.Pid, nil, end}, nil
}

func endProcess(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	sandbox.Wait(cmd)
}

// started is a replica that has answered.
type started struct {
	launched
	hello, first time.Duration // since its order
	again        time.Duration // its second call, warm
}

// start orders a replica and makes it do two calls, as a dispatcher does.
func (b *benchStage) start(ctx context.Context, how func(context.Context) (launched, error)) (started, error) {
	order := time.Now()
	l, err := how(ctx)
	if err != nil {
		return started{}, err
	}
	conn := wire.NewConn(l.conn)
	end := l.end
	s := started{launched: l}
	s.end = func() { _ = conn.Close(); end() }
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

// input is what a call brings.
func (b *benchStage) input() tensor.Tensor {
	n := sequence * b.width
	data := make([]byte, 0, 4*n)
	for i := range n {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(i*2654435761%1000)/500-1))
	}
	return tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, sequence, int64(b.width)}, Data: data}
}

func (b *benchStage) call(conn *wire.Conn, batch uint64) error {
	payload := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Tensors: []tensor.Tensor{b.input()}}}}}}}}.Append(nil)
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

// family is a zygote and its children: its replicas and a spare one.
func family(zygote int) []int {
	pids := []int{zygote}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", zygote, zygote)) // of one that has ended there are none
	for _, f := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// sharedMemory returns the proportional set sizes of processes in bytes, added up, and the part of it that is memory without a
// file, which of replicas on the map path is their parameters.
func sharedMemory(pids []int) (pss, memfds int64, err error) {
	for _, pid := range pids {
		f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, 0, err
		}
		for sc := bufio.NewScanner(f); sc.Scan(); {
			name, rest, _ := strings.Cut(sc.Text(), ":")
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			switch {
			case err != nil:
			case name == "Pss":
				pss += kb << 10
			case name == "Pss_Shmem":
				memfds += kb << 10
			}
		}
		_ = f.Close()
	}
	return pss, memfds, nil
}
