package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// actZygote runs a zygote that lies.
func actZygote(how string) error {
	fd, err := strconv.Atoi(os.Getenv(wire.EnvZygoteFD))
	if err != nil {
		return err
	}
	c, err := net.FileConn(os.NewFile(uintptr(fd), "control"))
	if err != nil {
		return err
	}
	conn := c.(*net.UnixConn)
	say := func(o wire.Order) {
		o.Version = wire.OrderVersion
		if _, err := conn.Write(wire.AppendOrder(nil, o)); err != nil {
			os.Exit(1) // ended
		}
	}
	say(wire.Order{Kind: wire.ZygoteReady, PID: uint32(os.Getpid())})
	var own *exec.Cmd
	buf, oob := make([]byte, zygote.MaxOrder), make([]byte, unix.CmsgSpace(4*32))
	for {
		n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
		if err != nil {
			return err
		}
		o, err := wire.DecodeOrder(buf[:n])
		if err != nil {
			return err
		}
		kind, number, _ := strings.Cut(how, "=")
		pid, _ := strconv.Atoi(number)
		switch {
		case o.Kind != wire.OrderFork:
		case kind == "child": // a process of somebody else
			say(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: uint32(pid)})
		case kind == "twice": // one child for all orders
			if own == nil {
				own = exec.Command("sleep", "600")
				if err := proctest.Start(own); err != nil {
					return err
				}
			}
			say(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: uint32(own.Process.Pid)})
		case kind == "gone": // a child that has ended
			say(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: 1 << 22})
			say(wire.Order{Kind: wire.ChildExited, PID: 1 << 22, Status: 9})
		case kind == "files": // reports the descriptors that it was given
			say(wire.Order{Kind: wire.ZygoteError, ID: o.ID, Text: given(oob[:oobn])})
		case kind == "flood":
			for {
				say(wire.Order{Kind: wire.ChildForked, ID: 1 << 30, PID: 1 << 31})
			}
		}
	}
}

// given describes the files behind descriptors.
func given(oob []byte) string {
	var all []string
	messages, _ := unix.ParseSocketControlMessage(oob)
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m)
		for _, fd := range fds {
			link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
			all = append(all, link)
			if err != nil {
				all = append(all, err.Error())
			}
		}
	}
	return strings.Join(all, " ")
}

// hostile starts a replica from a zygote that lies, and returns the error of the start. If the
// start succeeds, the test fails. The zygote keeps no replica.
func (n *rig) hostile(how string) error {
	n.t.Helper()
	s := withModel
	s.Process, s.Start = os.Args[0]+" "+actAs+" zygote "+how, "heap"
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	r, err := n.Start(ctx, node.Order{Replica: "x", Spec: s})
	if err == nil {
		n.t.Fatalf("%s: replica %+v", how, r)
	}
	if ctx.Err() != nil {
		n.t.Fatalf("%s: %v", how, err)
	}
	return err
}

// TestALyingZygoteHarmsOnlyItself has zygotes that claim foreign processes as their children.
func TestALyingZygoteHarmsOnlyItself(t *testing.T) {
	n := grouped(t)
	victim := exec.Command("sleep", "600")
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = victim.Process.Kill(), victim.Wait() }()
	before, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", victim.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{victim.Process.Pid, os.Getpid(), 1} {
		if err := n.hostile(fmt.Sprintf("child=%d", pid)); !strings.Contains(err.Error(), fmt.Sprintf("it says that process %d is its child", pid)) {
			t.Errorf("child %d: %v", pid, err)
		}
		proctest.Until(t, "the zygote to be ended", func() bool { return len(n.Inventory().Zygotes) == 0 })
	}
	after, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", victim.Process.Pid))
	if err != nil || string(after) != string(before) {
		t.Errorf("somebody else's process is in the cgroups\n%s%v, was in\n%s", after, err, before)
	}
	for _, pid := range []string{"0", "4294967295"} { // process ids that no process has
		if err := n.hostile("child=" + pid); err == nil {
			t.Errorf("child %s is taken", pid)
		}
	}
	if err := victim.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("somebody else's process: %v", err)
	}
	// A zygote must get no descriptor that lets it reach other processes. With a file of a cgroup
	// that root has opened, it could move any process of the machine into that cgroup.
	if err := n.hostile("files"); !strings.Contains(err.Error(), "socket:") || strings.Contains(err.Error(), "cgroup") {
		t.Errorf("it was given %v", err)
	}
	if err := n.hostile("flood"); !strings.Contains(err.Error(), "more messages than it was asked for") {
		t.Errorf("a zygote that talks without end: %v", err)
	}
	if _, err := n.Start(t.Context(), node.Order{Replica: "x", Spec: withModel}); err != nil && !errors.Is(err, ErrRunning) {
		t.Errorf("another one: %v", err)
	}
}

// TestOneChildForTwoOrdersEndsItsZygote checks that a zygote that names one child for two orders is
// ended, together with that child.
func TestOneChildForTwoOrdersEndsItsZygote(t *testing.T) {
	n := newNode(t, nil)
	s := withModel
	s.Process, s.Start = os.Args[0]+" "+actAs+" zygote twice", "heap"
	r, err := n.Start(t.Context(), node.Order{Replica: "x", Spec: s})
	cause := fmt.Sprint(err)
	if err == nil {
		_ = r.Conn.Close()
		cause = n.exit().Cause
	}
	if !strings.Contains(cause, "is its child, and said so before") {
		t.Errorf("got %q, want the lie", cause)
	}
}

// TestAChildThatHasEndedIsNoSilentReplica has a zygote whose child has already ended when the
// zygote names it. Either the start fails, or the end of the replica is reported.
func TestAChildThatHasEndedIsNoSilentReplica(t *testing.T) {
	n := newNode(t, nil)
	s := withModel
	s.Process, s.Start = os.Args[0]+" "+actAs+" zygote gone", "heap"
	for i := range 20 {
		name := strconv.Itoa(i)
		r, err := n.Start(t.Context(), node.Order{Replica: name, Spec: s})
		if err != nil {
			continue
		}
		_ = r.Conn.Close()
		if e := n.exit(); e.Replica != name || e.Cause != "killed by SIGKILL" {
			t.Errorf("exit %+v, want that of %s", e, name)
		}
	}
	n.Close()
	if len(n.exits) > 0 {
		t.Errorf("exit %+v of what was not started", <-n.exits)
	}
}
