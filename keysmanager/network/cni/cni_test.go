package cni

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/network"
)

// The main goroutine keeps the process's first thread, so that no test changes that thread's
// namespace.
func init() { runtime.LockOSThread() }

// TestMain runs the tests in a network namespace that stands for the machine.
func TestMain(m *testing.M) {
	switch os.Getenv("CNI_TEST") {
	case "machine":
		os.Exit(m.Run())
	case "child":
		child()
		return
	}
	if os.Geteuid() != 0 {
		os.Exit(m.Run()) // each test says that it needs root
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), "CNI_TEST=machine")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// dirs are where distributions and CNI's conventions have plugins.
var dirs = []string{"/usr/lib/cni", DefaultBinDir}

var replicas = netip.MustParsePrefix("10.231.0.0/16")

// operator is what an operator has: a configuration of plugins and their state.
type operator struct {
	t              testing.TB
	run, conf, ips string // folders
}

func newOperator(t testing.TB) *operator {
	t.Helper()
	why := ""
	if os.Geteuid() != 0 {
		why = "CNI needs root"
	} else if missing := check(t.Context(), Config{Conf: write(t, t.TempDir(), "a.conflist", bridge(t.TempDir())), BinDirs: dirs}); missing != nil {
		why = missing.Error() + " (Debian: apt-get install containernetworking-plugins)"
	}
	if why != "" {
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	o := &operator{t: t, run: filepath.Join(t.TempDir(), "run"), conf: t.TempDir(), ips: t.TempDir()}
	write(t, o.conf, "10-ours.conflist", bridge(o.ips))
	return o
}

// bridge returns a configuration of the plugins bridge and host-local.
func bridge(ips string) string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "ours", "plugins": [{"type": "bridge", "bridge": "ours0", "isGateway": true,
		"dns": {"nameservers": ["10.77.0.1"], "search": ["example"]},
		"ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.77.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, ips)
}

func write(t testing.TB, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func (o *operator) config() network.Config {
	return network.Config{CIDR: replicas, Run: o.run, Owner: "test " + o.run, Log: slog.New(slog.DiscardHandler)}
}

func (o *operator) open(conf string, bin ...string) *Networks {
	o.t.Helper()
	n, err := Open(o.config(), Config{Conf: conf, BinDirs: append(bin, dirs...)})
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() {
		if err := n.Close(); err != nil {
			o.t.Error(err)
		}
	})
	return n
}

// taken returns the addresses that host-local has given.
func (o *operator) taken() (out []string) {
	o.t.Helper()
	entries, err := os.ReadDir(filepath.Join(o.ips, "ours"))
	if err != nil && !os.IsNotExist(err) {
		o.t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "10.") {
			out = append(out, e.Name())
		}
	}
	return out
}

// left returns what is left of replicas' networks: addresses, links, records, entries of the cache.
func (o *operator) left(n *Networks) (out []string) {
	o.t.Helper()
	out = append(o.taken(), n.records.ids(n.records.own)...)
	links, err := net.Interfaces()
	if err != nil {
		o.t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Name, "veth") || strings.HasPrefix(l.Name, "sgc") {
			out = append(out, l.Name)
		}
	}
	return out
}

// enter runs f in a namespace.
func enter(t testing.TB, ns *os.File, f func() error) error {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with f
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// dial connects from a namespace, and returns the address that it has there.
func dial(t testing.TB, ns *os.File, to string) (from string, err error) {
	t.Helper()
	err = enter(t, ns, func() error {
		c, err := net.DialTimeout("tcp", to, time.Minute)
		if err == nil {
			from = c.LocalAddr().(*net.TCPAddr).IP.String()
			c.Close()
		}
		return err
	})
	return from, err
}

// listen accepts connections to an address of the machine until the test ends.
func listen(t testing.TB, at string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	})
	t.Cleanup(func() { l.Close(); running.Wait() })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// start starts a process in a namespace. The returned function ends it.
func start(t testing.TB, ns *os.File) (end func()) {
	t.Helper()
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err == nil {
		err = enter(t, ns, cmd.Start)
	}
	if err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() { in.Close(); _ = cmd.Wait() })
	t.Cleanup(end)
	return end
}

func TestPluginsConnectReplicas(t *testing.T) {
	o := newOperator(t)
	n := o.open(o.conf)
	gateway := listen(t, n.Gateway().String()+":0")
	closed := listen(t, n.Gateway().String()+":0")
	if err := n.Admit(gateway); err != nil {
		t.Fatal(err)
	}
	first, resolv, err := n.Create()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(resolv); err != nil || string(b) != "nameserver 10.77.0.1\nsearch example\n" {
		t.Errorf("resolv.conf is %q, %v, want what the plugins say", b, err)
	}
	second, _, err := n.Create()
	if err != nil {
		t.Fatal(err)
	}
	outside := listen(t, "10.77.0.1:0") // the bridge's address
	a, errA := dial(t, first, outside.String())
	b, errB := dial(t, second, outside.String())
	if err := errors.Join(errA, errB); err != nil || a == b || !strings.HasPrefix(a, "10.77.0.") || !strings.HasPrefix(b, "10.77.0.") {
		t.Errorf("two replicas have the addresses %s and %s, %v, want two of 10.77.0.0/24", a, b, err)
	}
	if from, err := dial(t, first, gateway.String()); err != nil || !replicas.Contains(netip.MustParseAddr(from)) {
		t.Errorf("the gateway sees %s, %v, want an address of %v", from, err, replicas)
	}
	for what, to := range map[string]string{
		"a port of the gateway's address that is not admitted": closed.String(),
		"the metadata of a cloud":                              "169.254.169.254:80",
	} {
		if _, err := dial(t, first, to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: %v, want it refused", what, err)
		}
	}
	// A process keeps its network, and its end gives it back.
	end := start(t, first)
	first.Close()
	second.Close()
	n.Ended()
	proctest.Until(t, "the network without a process to be given back", func() bool { return len(o.taken()) == 1 })
	if got := o.taken()[0]; got != a {
		t.Errorf("%s is taken, want %s, whose process runs", got, a)
	}
	end()
	n.Ended()
	proctest.Until(t, "all to be given back", func() bool { return len(o.left(n)) == 0 })
}

// child opens an operator's networks, creates one and waits for its end.
func child() {
	ns, err := func() (*os.File, error) {
		o := &operator{run: os.Getenv("CNI_TEST_RUN")}
		n, err := Open(o.config(), Config{Conf: os.Getenv("CNI_TEST_CONF"), BinDirs: dirs})
		if err != nil {
			return nil, err
		}
		ns, _, err := n.Create()
		return ns, err
	}()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("created", ns.Fd())
	_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed
}

func TestNextProcessGivesBackWhatAKilledOneLeft(t *testing.T) {
	o := newOperator(t)
	for name, owner := range map[string]string{
		"the same owner": o.config().Owner, "another owner": "another " + o.run, "the owner after a restart of the machine": o.config().Owner,
	} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), "CNI_TEST=child", "CNI_TEST_RUN="+o.run, "CNI_TEST_CONF="+o.conf)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		stdout, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(stdout).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "created") {
			t.Fatalf("child says %q, %v", line, err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		if got := o.taken(); len(got) != 1 {
			t.Fatalf("%s: %q are taken, want the killed one's address", name, got)
		}
		if strings.Contains(name, "restart") { // which empties the folder
			mounted, err := filepath.Glob(filepath.Join(o.run, "networks", "cni", "*", "ns"))
			if err != nil || len(mounted) != 1 {
				t.Fatalf("%q, %v, want one namespace", mounted, err)
			}
			if err := errors.Join(unix.Unmount(mounted[0], 0), os.RemoveAll(o.run)); err != nil {
				t.Fatal(err)
			}
		}
		c := o.config()
		c.Owner = owner
		n, err := Open(c, Config{Conf: o.conf, BinDirs: dirs})
		if err != nil {
			t.Fatal(err)
		}
		proctest.Until(t, name+" to give it back", func() bool { return len(o.left(n)) == 0 })
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

// script writes a plugin that answers an ADD by a script.
func script(t testing.TB, name, add string) (bin string) {
	t.Helper()
	bin = t.TempDir()
	write(t, bin, name, "#!/bin/sh\ncat >/dev/null\ncase $CNI_COMMAND in\n"+
		`VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}' ;;`+"\nADD) "+add+" ;;\nesac\n")
	return bin
}

func TestErrorsOfPluginsSayWhatIsWrong(t *testing.T) {
	o := newOperator(t)
	conf := write(t, t.TempDir(), "x.conf", `{"cniVersion": "1.0.0", "name": "odd", "type": "odd"}`)
	for name, tc := range map[string]struct{ add, want string }{
		"hangs":      {"sleep 10000; true", "network odd of " + conf + `: plugin type="odd" name="odd" failed (add): plugin odd has not answered within 2s and was killed`},
		"fails":      {`echo '{"code": 7, "msg": "no more ports"}'; exit 1`, "no more ports"},
		"dies":       {"echo oh no >&2; exit 3", `plugin odd: exit status 3, it printed "oh no"`},
		"no address": {`echo '{"cniVersion":"1.0.0"}'`, "answered without an address"},
	} {
		var log bytes.Buffer
		c := o.config()
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
		n, err := open(c, Config{Conf: conf, BinDirs: []string{script(t, "odd", tc.add)}}, 2*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := n.Create(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
		proctest.Until(t, "nothing to be left", func() bool { return len(o.left(n)) == 0 })
		if err := n.Close(); err != nil || strings.Contains(log.String(), "WARN") {
			t.Errorf("%s: %v, logged %s", name, err, log.String())
		}
	}
}

func TestOpenRefusesWhatCannotWork(t *testing.T) {
	o := newOperator(t)
	folder := t.TempDir()
	write(t, folder, "20.conflist", "{")
	write(t, folder, "10.conf", `{"cniVersion": "1.0.0", "name": "first", "type": "none-such"}`)
	for name, tc := range map[string]struct{ conf, want string }{
		"no file":             {filepath.Join(folder, "none"), "no such file"},
		"empty folder":        {t.TempDir(), "no .conflist, .conf or .json file"},
		"no JSON":             {filepath.Join(folder, "20.conflist"), "20.conflist"},
		"no name":             {write(t, t.TempDir(), "x.conf", `{"cniVersion": "1.0.0", "type": "bridge"}`), `it has no "name"`},
		"missing plugin":      {folder, "plugin none-such of --cni-conf " + folder + ": no none-such in /usr/lib/cni, " + DefaultBinDir},
		"missing IPAM":        {write(t, t.TempDir(), "x.conf", `{"cniVersion": "1.0.0", "name": "x", "type": "bridge", "ipam": {"type": "none-such"}}`), "plugin none-such of"},
		"version of tomorrow": {write(t, t.TempDir(), "x.conf", `{"cniVersion": "9.0.0", "name": "x", "type": "bridge"}`), `does not support config version "9.0.0"`},
	} {
		if n, err := Open(o.config(), Config{Conf: tc.conf, BinDirs: dirs}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
			if n != nil {
				n.Close()
			}
		}
	}
}
