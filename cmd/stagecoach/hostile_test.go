package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// attackers returns a folder of images with the built ones and test/hostile:1.
func attackers(t *testing.T) string {
	t.Helper()
	images := t.TempDir()
	if err := os.Chmod(images, 0o755); err != nil { //nolint:gosec // functions are users of their own
		t.Fatal(err)
	}
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(images, "test", "hostile", "1", "hostile")
	build := exec.Command("go", "build", "-o", program, "./testdata/hostile")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return images
}

// attack makes a function of the image test/hostile:1 carry out orders, and returns the result of
// each.
func (r *rig) attack(function string, orders ...string) []string {
	r.t.Helper()
	a := r.must(http.StatusOK, http.MethodPost, "/function/"+function, strings.Join(orders, "\n")+"\n")
	var out []string
	for line := range strings.Lines(string(a.Body)) {
		order := orders[len(out)]
		outcome, ok := strings.CutPrefix(strings.TrimSpace(line), order+": ")
		if !ok {
			r.t.Fatalf("%q, want what came of %q", line, order)
		}
		if out = append(out, outcome); len(out) == len(orders) {
			break
		}
	}
	if len(out) < len(orders) {
		r.t.Fatalf("%s: %d answers, want %d", a.Body, len(out), len(orders))
	}
	return out
}

// replica returns the process of a function's only replica.
func (r *rig) replica(function string) int {
	r.t.Helper()
	var pids []int
	for _, p := range r.descendants() {
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid)) // of one that has ended: empty
		if strings.Contains(string(env), wire.EnvFunction+"="+function+".openfaas-fn\x00") {
			pids = append(pids, p.pid)
		}
	}
	if len(pids) != 1 {
		r.t.Fatalf("%s has the processes %v, want one", function, pids)
	}
	return pids[0]
}

// ipOf returns the address that a process has in its network; empty: it has loopback alone.
func ipOf(t *testing.T, pid int) string {
	t.Helper()
	var all []net.Addr
	inNetworkOf(t, pid, func() (err error) {
		all, err = net.InterfaceAddrs()
		return err
	})
	for _, a := range all {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLoopback() {
			return ip.IP.String()
		}
	}
	return ""
}

// inNetworkOf calls f on a thread that is in a process's network namespace.
func inNetworkOf(t *testing.T, pid int, f func() error) {
	t.Helper()
	var err error
	proctest.OnThread(func() {
		var fd int
		if fd, err = unix.Open(fmt.Sprintf("/proc/%d/ns/net", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		err = unix.Setns(fd, unix.CLONE_NEWNET)
		_ = unix.Close(fd)
		if err == nil {
			err = f()
		}
	})
	if err != nil {
		t.Fatalf("network of process %d: %v", pid, err)
	}
}

// TestAHostileFunctionReachesNobody checks that a function reaches other functions through the
// gateway, and nothing else of its machine.
func TestAHostileFunctionReachesNobody(t *testing.T) {
	needRoot(t)
	t.Parallel()
	r := start(t, "--nats-listen", "127.0.0.1:0", "--images", attackers(t))
	one := map[string]string{"min": "1", "max": "1"}
	r.deployAll(
		httpFn("victim", one),
		fn{"told", "noop", nil, nil, nil},
		fn{"hostile", "test/hostile:1", map[string]string{"min": "1"}, nil, map[string]string{"fprocess": "./hostile", "mode": "streaming"}},
		fn{"hermit", "test/hostile:1", one, map[string]string{"network": "none"}, map[string]string{"fprocess": "./hostile", "mode": "streaming"}},
	)
	for _, name := range []string{"victim", "hostile", "hermit"} {
		r.until(late, "a replica of "+name, func() bool { return r.shows(name).AvailableReplicas == 1 })
	}
	open, err := net.Listen("tcp", ":0") // on all addresses of the machine, IPv6's too
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	_, port, _ := net.SplitHostPort(open.Addr().String()) // of a listener it is well-formed
	hidden, err := net.Listen("unix", "@"+t.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer hidden.Close()
	nats := r.joinURL()
	refused := []string{
		"tcp " + r.up.Addr, "tcp " + strings.TrimPrefix(nats, "nats://"), "tcp gateway.openfaas:" + port, "tcp gateway.openfaas:22",
		"tcp " + net.JoinHostPort(ipOf(t, r.replica("victim")), "8080"), "tcp 169.254.169.254:80", "tcp [fd00:ec2::254]:80",
		"abstract " + t.Name(), "raw",
	}
	machine, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range machine {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLinkLocalUnicast() {
			refused = append(refused, "tcp "+net.JoinHostPort(ip.IP.String(), port))
		}
	}
	for i, outcome := range r.attack("hostile", refused...) {
		if outcome == "reached" || outcome == "<nil>" || strings.Contains(outcome, "timeout") {
			t.Errorf("%s: %s, want it refused at once", refused[i], outcome)
		}
	}
	const call, manage = "get http://gateway.openfaas:8080/function/victim/echo", "get http://gateway.openfaas:8080/system/functions"
	if got := r.attack("hostile", call, manage, "get http://gateway.openfaas:8080/metrics"); !strings.HasPrefix(got[0], "200") ||
		!strings.HasPrefix(got[1], "401") || !strings.HasPrefix(got[2], "401") {
		t.Errorf("through the gateway: %q, want 200 from the function and 401 from the rest", got)
	}
	told := "async http://gateway.openfaas:8080/async-function/victim http://gateway.openfaas:8080/function/told"
	if got := r.attack("hostile", told); !strings.HasPrefix(got[0], "202") {
		t.Errorf("%s: %s", told, got[0])
	}
	r.until(late, "a callback to a function", func() bool { return r.shows("told").InvocationCount == 1 })
	for _, host := range []string{"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"} {
		async := "async http://gateway.openfaas:8080/async-function/victim http://" + host + ":" + port + "/"
		if got := r.attack("hostile", async); !strings.HasPrefix(got[0], "202") {
			t.Errorf("%s: %s", async, got[0])
		}
		r.until(late, "its callback to be refused", func() bool {
			return strings.Contains(r.log.String(), "functions cannot reach "+host+":"+port)
		})
	}
	got := r.attack("hermit", "tcp "+r.up.Addr, "get "+strings.TrimPrefix(call, "get "), "abstract "+t.Name())
	if slices.Contains(got, "reached") || strings.HasPrefix(got[1], "200") {
		t.Errorf("without a network: %q, want all refused", got)
	}
	if ip := ipOf(t, r.replica("hermit")); ip != "" {
		t.Errorf("a function with the network none has the address %s", ip)
	}
}

// TestAHostileFunctionTakesNoMore checks that its processes, memory and files are bounded, and that
// no other function suffers.
func TestAHostileFunctionTakesNoMore(t *testing.T) {
	needRoot(t)
	needGroups(t)
	t.Parallel()
	r := start(t, "--images", attackers(t))
	hungry := fn{"hungry", "test/hostile:1", map[string]string{"min": "1", "max": "1"}, nil, map[string]string{"fprocess": "./hostile", "mode": "streaming"}}.deployment()
	hungry.Limits = &client.Resources{Memory: "1Gi"}
	if err := r.Deploy(t.Context(), hungry); err != nil {
		t.Fatal(err)
	}
	r.deployAll(fn{"victim", "noop", map[string]string{"min": "1"}, nil, nil})
	for _, name := range []string{"hungry", "victim"} {
		r.until(late, "a replica of "+name, func() bool { return r.shows(name).AvailableReplicas == 1 })
	}
	victim := r.replica("victim")
	beyond := fmt.Sprintf("forks %d", sandbox.MaxProcesses+300)
	got := r.attack("hungry", "fill x", "fill /usr/x", "fill /dev/shm/x", "commands", beyond)
	for i, want := range []string{"read-only|denied", "read-only|denied", "64 MiB, then|no space left", `^\["[^"]*/hostile "\]$`, "annot fork|temporarily unavailable"} {
		if !regexp.MustCompile(want).MatchString(got[i]) {
			t.Errorf("%s, want %s", got[i], want)
		}
	}
	a := r.must(http.StatusInternalServerError, http.MethodPost, "/function/hungry", "memory 2000\n")
	if !strings.Contains(string(a.Body), "killed: out of memory, its limit is 1 GiB (limits.memory)") {
		t.Errorf("%s, want it killed at its limit of memory", a.Body)
	}
	// The processes and the memory of what was killed may be there for a moment longer.
	r.until(late, "it to serve again", func() bool {
		a := r.send(http.MethodPost, "/function/hungry", "memory 10\n")
		return a.Status == http.StatusOK && string(a.Body) == "memory 10: 10\n"
	})
	r.must(http.StatusOK, http.MethodPost, "/function/victim", "x")
	if now := r.replica("victim"); now != victim {
		t.Errorf("the victim's replica was %d, is %d", victim, now)
	}
}

// TestNetworkOfAnAdoptedReplica checks that a replica of a killed daemon keeps its network, and
// that the next daemon gives new replicas other networks.
func TestNetworkOfAnAdoptedReplica(t *testing.T) {
	needRoot(t)
	t.Parallel()
	images := attackers(t)
	n := startNodes(t, "--no-node", "--images", images)
	d := n.daemon("n1", "--images", images)
	hostile := map[string]string{"fprocess": "./hostile", "mode": "streaming"}
	n.deployAll(
		fn{"hostile", "test/hostile:1", map[string]string{"min": "1", "max": "1"}, nil, hostile},
		fn{"victim", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil},
	)
	n.steady("hostile", 1, "n1")
	n.steady("victim", 1, "n1")
	addresses := func() map[string]string {
		inv, _ := n.inventory("n1")
		out := map[string]string{}
		for _, r := range inv.Replicas {
			out[r.Name] = ipOf(t, r.PID)
		}
		return out
	}
	before := addresses()
	const call, manage = "get http://gateway.openfaas:8080/function/victim", "get http://gateway.openfaas:8080/system/functions"
	check := func(when string) {
		t.Helper()
		if got := n.attack("hostile", call, manage, "tcp "+n.up.Addr); !strings.HasPrefix(got[0], "200") || !strings.HasPrefix(got[1], "401") || got[2] == "reached" {
			t.Errorf("%s: %q, want the function reached and nothing else", when, got)
		}
	}
	check("at first")
	sockets := []string{"unix " + filepath.Join(d.state, "run", "node.sock"), "unix " + filepath.Join(d.state, "warden"), "list " + d.state, "read " + n.token()}
	for i, outcome := range n.attack("hostile", sockets...) {
		if outcome == "reached" || strings.HasPrefix(outcome, "[") || strings.HasPrefix(outcome, `"`) {
			t.Errorf("%s: %s, want it refused", sockets[i], outcome)
		}
	}
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	check("without a daemon")
	n.restartDaemon(d)
	check("adopted")
	n.deployAll(fn{"later", "test/hostile:1", map[string]string{"min": "1", "max": "1"}, nil, hostile})
	n.steady("later", 1, "n1")
	n.until(soon, "three replicas in the inventory", func() bool { inv, _ := n.inventory("n1"); return len(inv.Replicas) == 3 })
	seen := map[string]bool{}
	for name, ip := range addresses() {
		if was, ok := before[name]; ok && was != ip || ip == "" || seen[ip] {
			t.Errorf("%s has the address %q, had %q; want one that stays its own", name, ip, was)
		}
		seen[ip] = true
	}
}

// TestTheMachinesNetworkIsAllowed checks that a function gets the machine's network only if the
// operator allows it.
func TestTheMachinesNetworkIsAllowed(t *testing.T) {
	needRoot(t)
	t.Parallel()
	asks := fn{"open", "test/hostile:1", nil, map[string]string{"network": "host"}, map[string]string{"fprocess": "./hostile", "mode": "streaming"}}
	images := attackers(t)
	r := start(t, "--images", images, "--allow-host-network")
	r.deployAll(asks)
	if got := r.attack("open", "tcp "+r.up.Addr); got[0] != "reached" {
		t.Errorf("%q, want it to reach what the machine reaches", got)
	}
	r.stop()
	r.args = slices.DeleteFunc(r.args, func(s string) bool { return s == "--allow-host-network" })
	r.restart()
	if a := r.must(http.StatusServiceUnavailable, http.MethodPost, "/function/open", "", "X-Timeout", "5s"); !strings.Contains(string(a.Body), "--allow-host-network") {
		t.Errorf("%s, want the flag named", a.Body)
	}
	a := r.must(http.StatusBadRequest, http.MethodPost, "/system/functions",
		`{"service":"more","image":"test/hostile:1","envProcess":"./hostile","annotations":{"stagecoach.dev/network":"host"}}`)
	if want := `annotations["stagecoach.dev/network"]: got "host", want default or none`; !strings.Contains(string(a.Body), want) {
		t.Errorf("%s, want %s", a.Body, want)
	}
}
