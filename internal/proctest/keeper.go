package proctest

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// patience bounds events that normally take milliseconds.
const patience = time.Minute

// Keeper is the test's end of the control socket of a process that takes a zygote's orders.
type Keeper struct {
	Cmd    *exec.Cmd
	Socket *net.UnixConn
	Stderr *Buffer
	t      testing.TB
}

// Buffer can be read while it is written.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *Buffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *Buffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Keep starts a program in a folder, with its control socket as descriptor 3. The program is killed
// after two minutes, or when the test ends.
func Keep(t testing.TB, folder string, env []string, name string, args ...string) *Keeper {
	t.Helper()
	socket, there := Pair(t, unix.SOCK_SEQPACKET)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	k := &Keeper{Cmd: exec.CommandContext(ctx, name, args...), Socket: socket, Stderr: &Buffer{}, t: t}
	k.Cmd.Dir, k.Cmd.Env, k.Cmd.ExtraFiles, k.Cmd.Stderr = folder, append([]string{"PATH=" + os.Getenv("PATH"), wire.EnvZygoteFD + "=3"}, env...), []*os.File{there}, k.Stderr
	// For processes that have inherited its stderr and should have ended with it.
	k.Cmd.WaitDelay = patience
	if err := k.Cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	there.Close()
	t.Cleanup(func() {
		cancel()
		if k.Cmd.ProcessState == nil {
			socket.Close()
			_ = k.Cmd.Wait()
		}
		if t.Failed() {
			t.Logf("zygote's stderr:\n%s", k.Stderr)
		}
	})
	return k
}

// Pair returns a socket pair: one end as a connection, the other as a file to pass on.
func Pair(t testing.TB, kind int) (*net.UnixConn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	here, there := os.NewFile(uintptr(fds[0]), "here"), os.NewFile(uintptr(fds[1]), "there")
	c, err := net.FileConn(here)
	here.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); there.Close() })
	return c.(*net.UnixConn), there
}

// Read returns the next message.
func (k *Keeper) Read() wire.Order {
	k.t.Helper()
	b := make([]byte, 4096)
	n, err := k.Socket.Read(b)
	if err != nil {
		k.t.Fatalf("read from zygote: %v; stderr: %s", err, k.Stderr)
	}
	o, err := wire.DecodeOrder(b[:n])
	if err != nil {
		k.t.Fatal(err)
	}
	return o
}

// Want reads the next message and checks its kind.
func (k *Keeper) Want(kind wire.OrderKind) wire.Order {
	k.t.Helper()
	o := k.Read()
	if o.Kind != kind {
		k.t.Fatalf("message %+v, want kind %c", o, kind)
	}
	return o
}

// Say sends a message with descriptors to the process, or to a child at its gate.
func (k *Keeper) Say(to *net.UnixConn, message []byte, files ...*os.File) {
	k.t.Helper()
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	if _, _, err := to.WriteMsgUnix(message, unix.UnixRights(fds...), nil); err != nil {
		k.t.Fatal(err)
	}
}

// Order sends an order without descriptors.
func (k *Keeper) Order(o wire.Order) {
	k.t.Helper()
	k.Say(k.Socket, Encode(o))
}

// Fork makes the process fork a child, which waits at its gate.
func (k *Keeper) Fork(id uint32) (pid int, gate *net.UnixConn) {
	k.t.Helper()
	gate, there := Pair(k.t, unix.SOCK_SEQPACKET)
	k.Say(k.Socket, Encode(wire.Order{Kind: wire.OrderFork, ID: id}), there)
	there.Close()
	o := k.Want(wire.ChildForked)
	if o.ID != id || o.PID == 0 || o.Nanos == 0 {
		k.t.Fatalf("forked %+v, want id %d, a pid and a time", o, id)
	}
	return int(o.PID), gate
}

// Alive returns the living children, sorted. Each must have been forked with this id.
func (k *Keeper) Alive(id uint32) (all []int) {
	k.t.Helper()
	k.Order(wire.Order{Kind: wire.OrderList, ID: 9})
	for {
		switch o := k.Read(); {
		case o.Kind == wire.OrderList && o.ID == 9:
			slices.Sort(all)
			return all
		case o.Kind == wire.ChildLives && o.ID == id:
			all = append(all, int(o.PID))
		default:
			k.t.Fatalf("in a list: %+v", o)
		}
	}
}

// Encode encodes an order of this version.
func Encode(o wire.Order) []byte {
	o.Version = wire.OrderVersion
	return wire.AppendOrder(nil, o)
}
