package main

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/device"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// benchStage is a synthetic stage, weights generated, and a KeysManager that starts replicas of it.
type benchStage struct {
	dir     string // all of it
	root    string // of its image
	ort     string // empty: it needs none
	process string // of its functions, as their env fprocess has it
	env     map[string]string
	input   tensor.Item                // of a call
	reads   func(answer []byte) string // takes out of an answer what is the same in all; nil: nobody looks
	images  sandbox.Images
	keys    *keysmanager.Manager
	machine machine
	users   bool   // stages have accounts of their own
	done    func() // with what isolate has opened; nil: nothing is open
	own     *sandbox.Spawner
	n       int                        // replicas so far, of those that order names
	told    func(replica, line string) // of each line that a replica prints; nil: it goes to standard error
	others  map[string]starter         // ways to start that are not the KeysManager's, by name of the case
}

// starter starts a replica, or what is compared with one, and returns when it has answered.
type starter func(context.Context) (started, error)

// benchImage is the name of its image, benchNamespace that of its functions.
const (
	benchImage     = "bench/stage:1"
	benchNamespace = "bench"
)

// machine is how the product uses the machine that it runs on.
type machine struct {
	// isolate returns the configuration of a KeysManager with users, networks and cgroups. What the
	// machine does not have is left out, and told to log. dir tells the KeysManager from others. done
	// gives all of it back.
	isolate func(dir string, log *slog.Logger) (cfg keysmanager.Config, done func(), err error)
	// devices returns the devices of a watch as a KeysManager takes them.
	devices func(*device.Watch) []keysmanager.Device
}

// newBenchStage makes a stage in a folder of its own, whose image prepare fills. The caller closes it.
func newBenchStage(m machine, prepare func(*benchStage) error) (*benchStage, error) {
	return newBenchStageIn(m, "", prepare)
}

// newBenchStageIn does the same in a folder below parent; empty: the one for temporary files.
func newBenchStageIn(m machine, parent string, prepare func(*benchStage) error) (*benchStage, error) {
	dir, err := os.MkdirTemp(parent, "stagecoach-bench-")
	if err != nil {
		return nil, err
	}
	images := filepath.Join(dir, "images")
	b := &benchStage{machine: m, dir: dir, root: filepath.Join(images, "bench", "stage", "1"), images: sandbox.Images{Dir: images}, own: sandbox.NewSpawner()}
	if err = os.Chmod(dir, 0o755); err == nil { //nolint:gosec // stages are users of their own
		err = prepare(b)
	}
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// manage makes the KeysManager, with users, networks and cgroups as the product has them, once the page cache is as it should be.
func (b *benchStage) manage() error {
	cfg, err := b.isolate(slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	return b.open(cfg)
}

// isolate returns the configuration of a KeysManager with users, networks and cgroups as the product
// has them. What the machine does not have is left out, and told to log. shut gives all of it back.
func (b *benchStage) isolate(log *slog.Logger) (cfg keysmanager.Config, err error) {
	cfg, b.done, err = b.machine.isolate(b.dir, log)
	b.users = cfg.Accounts != nil
	return cfg, err
}

// open makes the KeysManager.
func (b *benchStage) open(cfg keysmanager.Config) (err error) {
	cfg.Node, cfg.Images, cfg.ORT, cfg.Cache = "bench", b.images, b.ort, b.cache()
	cfg.Log, cfg.Metrics = slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	cfg.Output = func(_, replica, _, line string) {
		switch {
		case b.told != nil:
			b.told(replica, line)
		case !strings.Contains(replica, atOnce): // those are given up as soon as they are there, and say so
			console.Progress("%s: %s", replica, line)
		}
	}
	b.keys, err = keysmanager.New(cfg)
	return err
}

func (b *benchStage) cache() string { return filepath.Join(b.dir, "cache") }

// shut closes the KeysManager, if there is one, and gives back what isolate has opened.
func (b *benchStage) shut() {
	if b.keys != nil {
		b.keys.Close()
	}
	if b.done != nil {
		b.done()
	}
	b.keys, b.done, b.users = nil, nil, false
}

func (b *benchStage) close() {
	b.shut()
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
	conn   *net.UnixConn // nil: it speaks no stage protocol
	pid    int
	path   string // of the KeysManager
	phases []keysmanager.Phase
	end    func() // ends it and waits
}

// spec is what the KeysManager knows of the stage, on a start path.
func (b *benchStage) spec(path string) keysmanager.Spec {
	return keysmanager.Spec{
		Function: path + "." + benchNamespace, Namespace: benchNamespace, Image: benchImage, Process: b.process, Env: b.env, Start: path,
	}
}

// order orders a replica from the KeysManager, which it names unless it has a name. Replicas that it
// names are ordered by one goroutine at a time.
func (b *benchStage) order(ctx context.Context, o keysmanager.Order) (launched, error) {
	if o.Replica == "" {
		b.n++
		o.Replica = fmt.Sprintf("%s-%d", strings.TrimSuffix(o.Spec.Function, "."+benchNamespace), b.n)
	}
	r, err := b.keys.Start(ctx, o)
	if err != nil {
		return launched{}, err
	}
	return launched{r.Conn, r.PID, r.Path, r.Phases, func() { _ = b.keys.Stop(context.WithoutCancel(ctx), o.Replica, 10*time.Second) }}, nil
}

// started is a replica that has answered.
type started struct {
	launched
	hello, first time.Duration // since its order; a process that speaks no stage protocol says no hello: 0
	load, place  time.Duration // of the parameters in its process, as it says itself
	again        time.Duration // its second call, warm
	said         string        // what it has answered, which is the same however it was started; empty: nobody looks
	parts        deviceParts   // of its way onto a device
}

// deviceParts is how long the parts of a process's way onto a device took; 0: it had no such part, or
// did not say.
type deviceParts struct {
	imports time.Duration // of PyTorch
	context time.Duration // until the process has a context on the device
	copied  time.Duration // of the parameters to the device
	kernels time.Duration // until the first kernels have run; a replica does that beside the copy
}

// on returns what starts replicas on a path of the KeysManager.
func (b *benchStage) on(path string) starter {
	return func(ctx context.Context) (started, error) {
		return b.start(ctx, func(ctx context.Context) (launched, error) {
			return b.order(ctx, keysmanager.Order{Spec: b.spec(path)})
		})
	}
}

// start starts a replica and makes it do two calls, as a dispatcher does.
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
		stop := context.AfterFunc(ctx, func() { _ = l.conn.SetReadDeadline(time.Now()) }) // fails as the reads do
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
		if b.reads != nil {
			s.said = b.reads(answer)
		}
		begin := time.Now()
		_, err = b.call(conn, 2)
		s.again = time.Since(begin)
		return err
	}()
	if err != nil {
		s.end()
		return started{}, err
	}
	return s, nil
}

// call makes a replica do a call and returns what it answers.
func (b *benchStage) call(conn *wire.Conn, batch uint64) ([]byte, error) {
	payload := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{b.input}}}}}}.Append(nil)
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

// memAvailable is how many bytes this machine can give to processes.
func memAvailable() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
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
