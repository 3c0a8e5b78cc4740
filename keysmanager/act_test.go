package keysmanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// actAs, as the first argument, makes this test's binary a warden, or a daemon that can be killed.
const actAs = "act-as"

func act(role string, args []string) {
	var err error
	switch role {
	case "warden":
		err = actWarden()
	case "daemon":
		err = actDaemon(args[0], args[1], args[2], hand)
	case "zygote":
		err = actZygote(args[0])
	case "parks":
		err = actParks()
	case "works":
		err = actWorks(args[0])
	case "parked":
		err = actParked()
	case "churn":
		err = actDaemon(args[0], args[1], args[2], churn)
	case "loads":
		err = actDaemon(args[0], args[1], args[2], loads)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role+":", err)
		os.Exit(1)
	}
}

func actWarden() error {
	l, err := net.FileListener(os.NewFile(warden.ListenFD, "socket"))
	if err != nil {
		return err
	}
	return warden.Serve(context.Background(), warden.Server{Listener: l.(*net.UnixListener), Runtime: sandbox.NewSpawner(), Linger: time.Minute, Log: slog.New(slog.DiscardHandler)})
}

func launcherAt(folder string) warden.Launcher {
	return warden.Launcher{Socket: filepath.Join(folder, "socket"), Log: filepath.Join(folder, "log"), Command: []string{"/proc/self/exe", actAs, "warden"}}
}

// actDaemon runs a daemon that does something and waits to be killed.
func actDaemon(images, ort, folder string, do func(*Manager) error) error {
	c, err := warden.Launch(context.Background(), launcherAt(folder))
	if err != nil {
		return err
	}
	m, err := New(Config{
		Node: "n1", Images: sandbox.Images{Dir: images}, ORT: ort, Threads: 1, Warden: c,
		Cache: filepath.Join(folder, "cache"), Output: func(_, _, _, _ string) {}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	})
	if err == nil {
		err = do(m)
	}
	if err != nil {
		return err
	}
	select {}
}

var withoutModel = node.Spec{Function: "g.ns", Namespace: "ns", Image: "test/wait:1", Env: map[string]string{"wait_mean": "1ms"}}

// unixConn returns a connection with a descriptor of its own for the same socket.
func unixConn(f *os.File) (*net.UnixConn, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// hand starts eight replicas and passes their stage sockets to the test, over descriptor 3.
func hand(m *Manager) error {
	out, err := unixConn(os.NewFile(3, "test"))
	if err != nil {
		return err
	}
	for i := range 8 {
		s := withModel
		if i >= 6 {
			s = withoutModel
		}
		name := fmt.Sprint("r", i)
		r, err := m.Start(context.Background(), node.Order{Replica: name, Spec: s}, nil)
		if err != nil {
			return err
		}
		b, err := json.Marshal(startedReplica{name, node.Started{PID: r.PID, Path: r.Path, Phases: r.Phases}})
		if err != nil {
			return err
		}
		conn, err := r.Conn.(interface{ File() (*os.File, error) }).File()
		if err != nil {
			return err
		}
		if _, _, err := out.WriteMsgUnix(b, unix.UnixRights(int(conn.Fd())), nil); err != nil {
			return err
		}
		_ = conn.Close()
		_ = r.Conn.Close() // as a node does after it has passed it on
	}
	return nil
}

// churn starts and stops replicas without end, and prints a line for each. The first start also
// loads the zygote.
func churn(m *Manager) error {
	r, err := m.Start(context.Background(), node.Order{Replica: fmt.Sprint("first-", os.Getpid()), Spec: withModel}, nil)
	if err != nil {
		return err
	}
	fmt.Println(r.PID)
	for i := range 4 {
		go func() {
			for j := 0; ; j++ {
				o := node.Order{Replica: fmt.Sprintf("c%d-%d-%d", os.Getpid(), i, j), Spec: withModel}
				if j%4 == 3 {
					o.Spec = withoutModel
				}
				r, err := m.Start(context.Background(), o, nil)
				if err == nil && j%3 != 0 {
					err = m.Stop(context.Background(), o.Replica, 0)
				}
				if err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				fmt.Println(r.PID)
			}
		}()
	}
	return nil
}

// loads loads parameters without end.
func loads(m *Manager) error {
	s := withModel
	s.Process = "./packs"
	_, err := m.Start(context.Background(), node.Order{Replica: "never", Spec: s}, nil)
	return err
}

// daemon starts a daemon in a process of its own and returns the replicas that it has started.
func daemon(t *testing.T, folder string) (cmd *exec.Cmd, replicas []*startedReplica) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "test"), os.NewFile(uintptr(fds[1]), "daemon")
	in, err := unixConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	_ = ours.Close()
	cmd = exec.CommandContext(t.Context(), "/proc/self/exe", actAs, "daemon", images(t).Dir, proctest.Built(t, "ort", "libonnxruntime.so.1"), folder)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{theirs}, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	_ = in.SetReadDeadline(time.Now().Add(time.Minute))
	for range 8 {
		b, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
		n, oob, _, _, err := in.ReadMsgUnix(b, rights)
		if err != nil {
			t.Fatal(err)
		}
		var r startedReplica
		if err := json.Unmarshal(b[:n], &r); err != nil {
			t.Fatal(err)
		}
		c, err := unix.ParseSocketControlMessage(rights[:oob])
		if err != nil {
			t.Fatal(err)
		}
		got, err := unix.ParseUnixRights(&c[0])
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(got[0]), "stage")
		if r.Conn, err = wire.OpenSocket(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		t.Cleanup(func() { _ = r.Conn.Close() })
		replicas = append(replicas, &r)
	}
	return cmd, replicas
}

// actParks runs a zygote whose children know devices. GPU-bad is out of memory, and a child on
// GPU-slow never becomes ready.
func actParks() error {
	fd, err := strconv.Atoi(os.Getenv(wire.EnvZygoteFD))
	if err != nil {
		return err
	}
	conn, err := unixConn(os.NewFile(uintptr(fd), "control"))
	if err != nil {
		return err
	}
	var mu sync.Mutex
	children := map[int]bool{}
	say := func(o wire.Order) {
		o.Version = wire.OrderVersion
		_, _ = conn.Write(wire.AppendOrder(nil, o)) // fails if nobody listens
	}
	say(wire.Order{Kind: wire.ZygoteReady, PID: uint32(os.Getpid()), Prepacked: true})
	for {
		o, files, err := receiveFiles(conn)
		if err != nil {
			return err
		}
		mu.Lock()
		switch o.Kind {
		case wire.OrderList:
			for pid := range children {
				say(wire.Order{Kind: wire.ChildLives, PID: uint32(pid)})
			}
			say(wire.Order{Kind: wire.OrderList, ID: o.ID})
		case wire.OrderFork:
			c := exec.Command("/proc/self/exe", actAs, "parked")
			c.ExtraFiles, c.Stderr = files, os.Stderr
			if err := proctest.Start(c); err != nil {
				return err
			}
			resources.CloseFiles(files)
			pid := c.Process.Pid
			children[pid] = true
			say(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: uint32(pid)})
			go func() { // ends with the child
				_ = c.Wait()
				mu.Lock()
				defer mu.Unlock()
				delete(children, pid)
				say(wire.Order{Kind: wire.ChildExited, PID: uint32(pid), Status: uint32(c.ProcessState.Sys().(syscall.WaitStatus))})
			}()
		}
		mu.Unlock()
	}
}

// actParked runs a child at its gate, descriptor 3. If it becomes a replica, it waits for the end
// of its stage socket.
func actParked() error {
	gate, err := unixConn(os.NewFile(3, "gate"))
	if err != nil {
		return err
	}
	for {
		o, files, err := receiveFiles(gate)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case o.Kind == wire.OrderBegin:
			fmt.Fprintln(files[1], slices.DeleteFunc(o.Env, func(kv string) bool { return !strings.HasPrefix(kv, resources.EnvDevices+"=") }))
			_, _ = io.Copy(io.Discard, files[0])
			return nil
		}
		if slices.Contains(o.Env, resources.EnvDevices+"=GPU-slow") {
			continue
		}
		answer := wire.Order{Kind: wire.ChildParked, Version: wire.OrderVersion, Nanos: 1}
		if slices.Contains(o.Env, resources.EnvDevices+"=GPU-bad") {
			answer = wire.Order{Kind: wire.ZygoteError, Version: wire.OrderVersion, Text: "out of memory on device GPU-bad"}
		}
		if _, err := gate.Write(wire.AppendOrder(nil, answer)); err != nil || answer.Kind == wire.ZygoteError {
			return err
		}
	}
}

// receiveFiles reads a message and the files that come with it.
func receiveFiles(conn *net.UnixConn) (wire.Order, []*os.File, error) {
	buf, oob := make([]byte, zygote.MaxOrder), make([]byte, unix.CmsgSpace(4*8))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return wire.Order{}, nil, err
	}
	var files []*os.File
	messages, _ := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m)
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	o, err := wire.DecodeOrder(buf[:n])
	return o, files, err
}
