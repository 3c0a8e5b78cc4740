// Package starts starts replicas of synthetic stages on each start path, and times them.
package starts

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/device"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Stage is a synthetic stage with generated weights, and a KeysManager that starts replicas of it.
type Stage struct {
	Dir     string // all of it
	Root    string // of its image
	Ort     string // empty: it needs none
	Process string // of its functions, as their env fprocess has it
	Env     map[string]string
	Input   tensor.Item // of a call
	// reads returns the part of an answer that is equal in all starts; nil: answers are not compared.
	Reads   func(answer []byte) string
	Images  sandbox.Images
	Keys    *keysmanager.Manager
	machine Machine
	users   bool   // stages have accounts of their own
	done    func() // closes what Isolate has opened; nil: nothing is open
	own     *sandbox.Spawner
	n       int  // replicas so far that order has named
	spares  bool // a start has asked for spare containers
	// told gets each line that a replica prints; nil: they go to standard error.
	Told func(replica, line string)
	// others are ways to start that are not the KeysManager's, by name of the case.
	Others map[string]Starter
}

// Starter starts a replica, or what is compared with one, and returns when it has answered.
type Starter func(context.Context) (Started, error)

// Image is the name of its image, Namespace that of its functions.
const (
	Image     = "bench/stage:1"
	Namespace = "bench"
)

// Machine gives access to the machine as the product does.
type Machine struct {
	// Isolate returns the configuration of a KeysManager with users, networks and cgroups. It leaves
	// out and logs any of the three that the machine lacks. dir, a folder that only this KeysManager
	// uses, identifies it on the machine. done removes the users, networks and cgroups.
	Isolate func(dir string, log *slog.Logger) (cfg keysmanager.Config, done func(), err error)
	// Contain returns a Machine whose processes are in containers of the containerd at an address, in
	// a namespace of it.
	Contain func(address, namespace string) Machine
	// Devices returns the devices of a watch in the KeysManager's type.
	Devices func(*device.Watch) []keysmanager.Device
}

// newStage does the same as NewStageIn in the folder for temporary files.
func newStage(m Machine, prepare func(*Stage) error) (*Stage, error) {
	return NewStageIn(m, "", prepare)
}

// NewStageIn makes a stage in a folder of its own below parent, and calls prepare to fill its
// image. An empty parent means the folder for temporary files. The caller closes the stage.
func NewStageIn(m Machine, parent string, prepare func(*Stage) error) (*Stage, error) {
	dir, err := os.MkdirTemp(parent, "stagecoach-bench-")
	if err != nil {
		return nil, err
	}
	images := filepath.Join(dir, "images")
	b := &Stage{machine: m, Dir: dir, Root: filepath.Join(images, "bench", "stage", "1"), Images: sandbox.Images{Dir: images}, own: sandbox.NewSpawner()}
	if err = os.Chmod(dir, 0o755); err == nil { //nolint:gosec // stages are users of their own
		err = prepare(b)
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// Manage creates the KeysManager, with users, networks and cgroups as in the product.
func (b *Stage) Manage() error {
	cfg, err := b.Isolate(slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	return b.Open(cfg)
}

// Isolate returns the configuration of a KeysManager with users, networks and cgroups as in the
// product. It leaves out and logs any of the three that the machine lacks. Shut removes them.
func (b *Stage) Isolate(log *slog.Logger) (cfg keysmanager.Config, err error) {
	cfg, b.done, err = b.machine.Isolate(b.Dir, log)
	b.users = cfg.Accounts != nil
	return cfg, err
}

// Open creates the KeysManager.
func (b *Stage) Open(cfg keysmanager.Config) (err error) {
	cfg.Node, cfg.Images, cfg.ORT, cfg.Cache = "bench", b.Images, b.Ort, b.cache()
	cfg.Log, cfg.Metrics = slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	cfg.Output = func(_, replica, _, line string) {
		switch {
		case b.Told != nil:
			b.Told(replica, line)
		case !strings.Contains(replica, atOnce): // those are given up at once, and log it
			console.Progress("%s: %s", replica, line)
		}
	}
	b.Keys, err = keysmanager.New(cfg)
	return err
}

func (b *Stage) cache() string { return filepath.Join(b.Dir, "cache") }

// Shut closes the KeysManager, if there is one, and gives back what Isolate has opened.
func (b *Stage) Shut() {
	if b.Keys != nil {
		b.Keys.Close()
	}
	if b.done != nil {
		b.done()
	}
	b.Keys, b.done, b.users = nil, nil, false
}

// Close ends all that the stage has started, and removes its folder.
func (b *Stage) Close() {
	b.Shut()
	b.own.Close()
	_ = os.RemoveAll(b.Dir) // a temporary folder
}

// RoomFor returns an error unless the disk of a folder has this many free bytes.
func RoomFor(dir string, bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	if free := int64(st.Bavail) * st.Bsize; free < bytes {
		return fmt.Errorf("%d MB free in %s, want %d: set TMPDIR to a folder with more room", free>>20, dir, bytes>>20)
	}
	return nil
}

// Launched is a replica whose process runs.
type Launched struct {
	conn   wire.Socket // nil: it speaks no stage protocol
	PID    int
	Path   string // of the KeysManager
	phases []node.Phase
	End    func() // ends it and waits
}

// Spec returns the spec of the stage's function on a start path.
func (b *Stage) Spec(path string) node.Spec {
	return node.Spec{
		Function: pipeline.Key{Name: path, Namespace: Namespace}.String(), Namespace: Namespace, Image: Image, Process: b.Process, Env: b.Env, Start: path,
	}
}

// Order orders a replica from the KeysManager. It names the replica if the name is empty. Only one
// goroutine at a time may order replicas without names.
func (b *Stage) Order(ctx context.Context, o node.Order) (Launched, error) {
	if o.Replica == "" {
		b.n++
		o.Replica = fmt.Sprintf("%s-%d", pipeline.ParseKey(o.Spec.Function).Name, b.n)
	}
	r, err := b.Keys.Start(ctx, o, nil)
	if err != nil {
		return Launched{}, err
	}
	return Launched{r.Conn, r.PID, r.Path, r.Phases, func() { _ = b.Keys.Stop(context.WithoutCancel(ctx), o.Replica, 10*time.Second) }}, nil
}

// Started is a replica that has answered.
type Started struct {
	Launched
	// Both count from its order. hello is 0 for a process that does not speak the stage protocol.
	hello, first time.Duration
	load, place  time.Duration // of the parameters in its process, as it reports them
	again        time.Duration // its second call, warm
	// said is its answer, which is equal for all ways to start; empty: answers are not compared.
	said  string
	Parts DeviceParts // of its way onto a device
}

// DeviceParts has the durations of the steps by which a process gets its parameters onto a device.
// 0 means that the process did not do or report the step.
type DeviceParts struct {
	Imports time.Duration // of PyTorch
	Context time.Duration // until the process has a context on the device
	Copied  time.Duration // of the parameters to the device
	Kernels time.Duration // until the first kernels have run, in parallel with the copy
}

// on returns a Starter for a path of the KeysManager.
func (b *Stage) on(path string) Starter {
	return func(ctx context.Context) (Started, error) {
		return b.Start(ctx, func(ctx context.Context) (Launched, error) {
			return b.Order(ctx, node.Order{Spec: b.Spec(path)})
		})
	}
}

// Start starts a replica and makes it do two calls, as a dispatcher does.
func (b *Stage) Start(ctx context.Context, how func(context.Context) (Launched, error)) (Started, error) {
	order := time.Now()
	l, err := how(ctx)
	if err != nil {
		return Started{}, err
	}
	conn := wire.NewConn(l.conn)
	end := l.End
	s := Started{Launched: l}
	s.End = func() { _ = conn.Close(); end() }
	err = func() error {
		if err := conn.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			return err
		}
		// An error shows in the reads, too.
		stop := context.AfterFunc(ctx, func() { _ = l.conn.SetReadDeadline(time.Now()) })
		defer stop()
		f, err := expect(conn, wire.FrameHello)
		if err != nil {
			return err
		}
		s.hello = time.Since(order)
		if err := conn.Write(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: wire.Version}.Append(nil)}); err != nil {
			return err
		}
		hello, err := wire.DecodeHello(f)
		if err != nil {
			return err
		}
		s.load, s.place = hello.Load, hello.Place
		answer, err := b.call(conn, 1)
		if err != nil {
			return err
		}
		s.first = time.Since(order)
		if b.Reads != nil {
			s.said = b.Reads(answer)
		}
		begin := time.Now()
		_, err = b.call(conn, 2)
		s.again = time.Since(begin)
		return err
	}()
	if err != nil {
		s.End()
		return Started{}, err
	}
	return s, nil
}

// call makes a replica do a call and returns what it answers.
func (b *Stage) call(conn *wire.Conn, batch uint64) ([]byte, error) {
	payload := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{b.Input}}}}}}.Append(nil)
	if err := conn.Write(wire.Frame{Type: wire.FrameBatch, Batch: batch, Payload: payload}); err != nil {
		return nil, err
	}
	answer, err := expect(conn, wire.FrameResult)
	if err != nil {
		return nil, err
	}
	r, err := wire.DecodeResult(answer)
	if err == nil && len(r.Output) != 1 {
		err = fmt.Errorf("the answer has %d items, want one", len(r.Output))
	}
	if err != nil {
		return nil, err
	}
	return r.Output[0].Bytes, nil
}

// expect reads a frame and returns its payload.
func expect(conn *wire.Conn, want wire.FrameType) ([]byte, error) {
	f, err := conn.Read()
	if err != nil {
		return nil, fmt.Errorf("waiting for %v: %w", want, err)
	}
	for _, file := range f.Files {
		_ = file.Close()
	}
	if f.Type != want {
		return nil, fmt.Errorf("frame %v (%.200q), want %v", f.Type, f.Payload, want)
	}
	return f.Payload, nil
}

// MemAvailable returns how many bytes of memory this machine has.
func MemAvailable() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}

// Family returns the processes of a zygote and its children: its replicas and a spare one.
func Family(zygote int) []int {
	pids := []int{zygote}
	// A process that has ended has no children.
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", zygote, zygote))
	for _, f := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// SharedMemory returns the sum of the proportional set sizes of processes in bytes, and the part of
// that sum in memory without a file. Replicas on the map path have their parameters there.
func SharedMemory(pids []int) (pss, memfds int64, err error) {
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
