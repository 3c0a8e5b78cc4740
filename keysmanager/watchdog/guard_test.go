package watchdog

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// listenShared listens with SO_REUSEPORT, so that others can listen on the same port.
func listenShared(address string) (net.Listener, error) {
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		wrong := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(wrong, err)
	}}
	return c.Listen(context.Background(), "tcp", address)
}

// serveProgram runs this test's binary as a function's program. The program listens at the address
// in the variable `listen`, with SO_REUSEPORT if `shared` is set. It keeps running even if it
// cannot listen. A request for /close closes its listener.
func serveProgram() {
	listen := func(address string) (net.Listener, error) { return net.Listen("tcp", address) }
	if os.Getenv("shared") != "" {
		listen = listenShared
	}
	l, err := listen(os.Getenv("listen"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "program:", err)
		select {}
	}
	_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/close" {
			_ = l.Close()
			w.Header().Set("Connection", "close")
		}
		fmt.Fprint(w, "program")
	}))
	select {}
}

// programAt returns the configuration of a function whose program is [serveProgram].
func programAt(upstream, listen string, shared bool) *config {
	c := shell(modeHTTP, "")
	c.process, c.env = []string{os.Args[0]}, map[string]string{"WATCHDOG_TEST": "program", "listen": listen}
	if shared {
		c.env["shared"] = "yes"
	}
	if upstream != "" {
		c.upstream = &url.URL{Scheme: "http", Host: upstream}
	}
	return c
}

// watchdogAt runs this test's binary as a watchdog in its own session. It prints "ready", or why
// its program is not ready, and keeps running.
func watchdogAt() {
	p, err := startChild(context.Background(), sandbox.NewSpawner(), programAt(os.Getenv("upstream"), os.Getenv("listen"), os.Getenv("shared") != ""))
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		if os.Getenv("upstream") != os.Getenv("listen") {
			go func() { // there is no event for it
				for p.listensAt() == "" && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
		}
		err = p.wait(ctx, "")
		cancel()
	}
	if err == nil {
		err = errors.New("ready")
	}
	fmt.Println(strings.ReplaceAll(err.Error(), "\n", "; "))
	select {}
}

// startWatchdog starts a watchdog. said returns the line that it prints.
func startWatchdog(t *testing.T, s *sandbox.Spawner, function string, env map[string]string) (said func() string) {
	t.Helper()
	out, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	env["WATCHDOG_TEST"], env[wire.EnvFunction] = "program's watchdog", function
	cmd, err := s.Start(t.Context(), sandbox.Command{Dir: "/", Argv: []string{os.Args[0]}, Env: env, Stdout: theirs, Stderr: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Signal(syscall.SIGKILL)
		cmd.Wait()
		_ = out.Close()
	})
	return func() string {
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Error(err)
		}
		return strings.TrimSpace(line)
	}
}

// freeAddress returns a free address of this machine.
func freeAddress(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", proctest.Ports(t, 1)[0])
}

// TestOnePortGoesToOneFunction starts two functions on one port at the same time. One must become
// ready. The start of the other must fail with an error that names the first, even if its program
// keeps running or could listen on the port, too.
func TestOnePortGoesToOneFunction(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner()
	t.Cleanup(s.Close) // runs after the watchdogs have ended
	for _, shared := range []string{"", "yes"} {
		for range 5 {
			where := freeAddress(t)
			env := func() map[string]string {
				return map[string]string{"upstream": where, "listen": where, "shared": shared}
			}
			a, b := startWatchdog(t, s, "first", env()), startWatchdog(t, s, "second", env())
			first, second := a(), b()
			if second == "ready" {
				first, second = second, strings.ReplaceAll(first, `"second"`, `"first"`)
			}
			if first != "ready" || !strings.Contains(second, "http://"+where+` is taken by function "first", process `) {
				t.Errorf("shared=%s: %q and %q, want one to be ready and the other to name it", shared, first, second)
			}
		}
	}
}

// TestPortIsReserved checks that a function has its port before its program listens there.
func TestPortIsReserved(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner()
	t.Cleanup(s.Close)
	where := freeAddress(t)
	if said := startWatchdog(t, s, "first", map[string]string{"upstream": where, "listen": freeAddress(t)})(); !strings.Contains(said, "it listens on ") {
		t.Fatalf("%q", said)
	}
	said := startWatchdog(t, s, "second", map[string]string{"upstream": where, "listen": where})()
	if !strings.Contains(said, ` is taken by function "first", process `) {
		t.Errorf("%q, want that the first function has the port", said)
	}
}

// TestErrorSaysWhereTheProgramListens checks that the error for a program that does not come up
// says where it listens instead.
func TestErrorSaysWhereTheProgramListens(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner()
	t.Cleanup(s.Close)
	for listen, upstream := range map[string]string{"127.0.0.1": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::1": "[::1]"} {
		where, other := freeAddress(t), freeAddress(t)
		_, want, _ := net.SplitHostPort(where)
		_, got, _ := net.SplitHostPort(other)
		said := startWatchdog(t, s, "f", map[string]string{"upstream": where, "listen": net.JoinHostPort(listen, got)})()
		if text := fmt.Sprintf("it listens on %s; want %s, or say upstream_url=http://%s:%[1]s", got, want, upstream); !strings.HasSuffix(said, text) {
			t.Errorf("%q, want %q at the end", said, text)
		}
	}
}

// served starts a program. ask sends it a request and returns the answer.
func served(t testing.TB, c *config) (p *child, ask func(path string) (int, string)) {
	t.Helper()
	s := sandbox.NewSpawner()
	t.Cleanup(s.Close)
	p, err := startChild(t.Context(), s, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.process.Signal(syscall.SIGKILL)
		<-p.gone
	})
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := p.wait(ctx, ""); err != nil {
		t.Fatal(err)
	}
	h, forget := proxy(p, 1, 0)
	t.Cleanup(forget)
	return p, func(path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
}

// foreign serves a listener from this process, which is not a function's program.
func foreign(t *testing.T, l net.Listener, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "foreign") })}
	t.Cleanup(func() { _ = s.Close() })
	go func() { _ = s.Serve(l) }()
}

// TestPortIsTakenOver checks that calls fail if another process listens on the port beside the
// program or in its place.
//
// The test does not run in parallel. The test process is both the watchdog and the foreign listener
// here. A child of the watchdog counts as part of the replica, and between its fork and its exec it
// holds all sockets of the test process. If another test started a process now, the foreign
// listener would look like the replica's.
func TestPortIsTakenOver(t *testing.T) {
	for _, shared := range []bool{false, true} {
		where := freeAddress(t)
		p, ask := served(t, programAt(where, where, shared))
		if status, body := ask("/"); status != http.StatusOK || body != "program" {
			t.Fatalf("%d %q", status, body)
		}
		ask("/close") // so that the next request needs a new connection
		if shared {
			_ = p.process.Signal(syscall.SIGKILL)
			<-p.gone
			p, ask = served(t, programAt(where, where, shared))
			l, err := listenShared(where)
			foreign(t, l, err)
		} else {
			if status, body := ask("/"); status != http.StatusBadGateway || !strings.Contains(body, "refused") {
				t.Errorf("without a listener: %d %q", status, body)
			}
			l, err := net.Listen("tcp", where)
			foreign(t, l, err)
		}
		for range 20 {
			if status, body := ask("/"); status != http.StatusBadGateway || !strings.Contains(body, fmt.Sprintf("is taken by process %d (", os.Getpid())) {
				t.Fatalf("shared=%t: %d %q, want 502 and who has the port", shared, status, body)
			}
		}
		select {
		case <-p.guard.taken:
		default:
			t.Errorf("shared=%t: the replica does not end", shared)
		}
	}
}

// TestStartFailsAtOnceIfThePortIsTaken checks that the start does not wait for a program that stays
// up after it lost its port.
func TestStartFailsAtOnceIfThePortIsTaken(t *testing.T) {
	s := sandbox.NewSpawner()
	defer s.Close()
	where := freeAddress(t)
	c := shell(modeHTTP, "exec sleep 60")
	c.upstream = &url.URL{Scheme: "http", Host: where}
	p, err := startChild(t.Context(), s, c)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", where)
	foreign(t, l, err)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	var taken takenError
	if err := p.wait(ctx, ""); !errors.As(err, &taken) {
		t.Errorf("%v, want that the port is taken", err)
	}
	_ = p.process.Signal(syscall.SIGKILL)
	<-p.gone
}

// TestProgramOpensItsPortAgain checks that a program that opens its port again, or lets a child
// listen there, is still accepted.
func TestProgramOpensItsPortAgain(t *testing.T) {
	t.Parallel()
	where := freeAddress(t)
	p, ask := served(t, programAt(where, where, false))
	ask("/close")
	// In this process's session, as a program is in that of its watchdog.
	s := sandbox.NewSpawner()
	t.Cleanup(s.Close)
	command := programAt("", where, false).command()
	command.Stays = true
	cmd, err := s.Start(t.Context(), command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Signal(syscall.SIGKILL)
		cmd.Wait()
	})
	proctest.Until(t, "an answer", func() bool { status, _ := ask("/"); return status == http.StatusOK })
	select {
	case <-p.guard.taken:
		t.Error(p.guard.why)
	default:
	}
}

// TestProgramInItsOwnNetwork checks that in its own network, the program gets a usual port, and
// files for name look-ups.
func TestProgramInItsOwnNetwork(t *testing.T) {
	t.Parallel()
	c, err := parse([]string{someImage, wire.EnvNetwork + `={"own":true,"hosts":"/h","resolv":"/r"}`})
	if err != nil {
		t.Fatal(err)
	}
	if cmd := c.command(); cmd.Hosts != "/h" || cmd.Resolv != "/r" || !c.network.Own {
		t.Errorf("%+v", cmd)
	}
	if _, err := parse([]string{someImage, wire.EnvNetwork + "=own"}); err == nil || !strings.Contains(err.Error(), wire.EnvNetwork) {
		t.Errorf("%v, want an error that names %s", err, wire.EnvNetwork)
	}
}

func TestAnswersKnowsWhichAddressesAListenerServes(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		at     string
		only6  bool
		v4, v6 bool
	}{
		{"127.0.0.1:1", false, true, false},
		{"0.0.0.0:1", false, true, false},
		{"10.0.0.1:1", false, false, false},
		{"127.0.0.2:1", false, false, false},
		{"[::1]:1", false, false, true},
		{"[::]:1", false, true, true},
		{"[::]:1", true, false, true},
		{"[::ffff:127.0.0.1]:1", false, true, false},
	} {
		l := listener{at: netip.MustParseAddrPort(tc.at), only6: tc.only6}
		if v4, v6 := l.answers(loopback), l.answers(netip.IPv6Loopback()); v4 != tc.v4 || v6 != tc.v6 {
			t.Errorf("%+v: answers over IPv4 %t, IPv6 %t, want %t, %t", l, v4, v6, tc.v4, tc.v6)
		}
	}
}

// TestListenersHavePortAndAddress checks that the kernel lists each listening socket with its port
// and address.
func TestListenersHavePortAndAddress(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"} {
		for _, network := range []string{"tcp", "tcp6"} {
			if strings.Contains(address, ".") && network == "tcp6" {
				continue
			}
			l, err := net.Listen(network, address)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			want := l.Addr().(*net.TCPAddr).AddrPort()
			all, err := listeners(want.Port())
			if err != nil || len(all) != 1 || all[0].at.Port() != want.Port() || int(all[0].uid) != os.Getuid() {
				t.Fatalf("%s %s: %+v, %v", network, want, all, err)
			}
			if got := all[0]; got.only6 != (network == "tcp6") && want.Addr().IsUnspecified() && want.Addr().Is6() || got.at.Addr() != want.Addr() && address != "0.0.0.0:0" {
				t.Errorf("%s %s: %+v", network, want, got)
			}
			if procs := readProcesses(); procs.holder(all[0].inode) != os.Getpid() {
				t.Errorf("held by %d, want %d", procs.holder(all[0].inode), os.Getpid())
			}
		}
	}
}

// BenchmarkConnection measures the guard on new connections. Kept connections need no check.
func BenchmarkConnection(b *testing.B) { benchmarkGuard(b, (*http.Transport).CloseIdleConnections) }

func BenchmarkRequest(b *testing.B) { benchmarkGuard(b, func(*http.Transport) {}) }

func benchmarkGuard(b *testing.B, after func(*http.Transport)) {
	where := freeAddress(b)
	p, _ := served(b, programAt(where, where, false))
	guards := map[string]*guard{"shared network": p.guard, "own network": nil}
	for name, g := range guards {
		b.Run(name, func(b *testing.B) {
			p := &child{at: p.at, guard: g, root: g.root}
			t := &http.Transport{DialContext: p.dial}
			defer t.CloseIdleConnections()
			c := http.Client{Transport: t}
			for b.Loop() {
				resp, err := c.Get(p.at.String())
				if err != nil {
					b.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				after(t)
			}
		})
	}
}
