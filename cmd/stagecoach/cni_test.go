package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/network/cni"
)

// operatorsNetwork is a network of CNI plugins, as an operator has it. Its names and addresses are
// the test's own.
type operatorsNetwork struct {
	t      *testing.T
	bridge string
	subnet string // the first three numbers of its addresses
	ips    string // folder of host-local
	conf   string // folder of the configuration
}

// newOperatorsNetwork writes the configuration of a bridge.
func newOperatorsNetwork(t *testing.T, number int) *operatorsNetwork {
	t.Helper()
	needRoot(t)
	o := &operatorsNetwork{t: t, bridge: fmt.Sprintf("sgt%d-%d", number, os.Getpid()%100000), ips: t.TempDir(), conf: t.TempDir()}
	o.subnet = fmt.Sprintf("10.%d.%d", 180+number, os.Getpid()%250)
	text := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
		{"type": "bridge", "bridge": %q, "isGateway": true, "ipam": {"type": "host-local", "dataDir": %q,
			"ranges": [[{"subnet": "%s.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
		{"type": "portmap", "capabilities": {"portMappings": true}}]}`, o.bridge, o.bridge, o.ips, o.subnet)
	if err := os.WriteFile(filepath.Join(o.conf, "10-ours.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "link", "del", o.bridge).CombinedOutput(); err != nil {
			t.Errorf("the bridge: %v %s", err, out)
		}
	})
	return o
}

// flags are those of up.
func (o *operatorsNetwork) flags() []string {
	return []string{"--cni-conf", o.conf, "--cni-bin-dir", "/usr/lib/cni:" + cni.DefaultBinDir}
}

// taken returns the addresses that replicas have.
func (o *operatorsNetwork) taken() (out []string) {
	entries, _ := os.ReadDir(filepath.Join(o.ips, o.bridge)) // there are none yet
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), o.subnet) {
			out = append(out, e.Name())
		}
	}
	return out
}

// left returns what replicas have left in the network: addresses, links of the bridge, entries of
// the cache.
func (o *operatorsNetwork) left() []string {
	out := o.taken()
	for _, pattern := range []string{"/sys/class/net/" + o.bridge + "/brif/*", "/var/lib/cni/results/" + o.bridge + "-*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			o.t.Fatal(err)
		}
		out = append(out, found...)
	}
	return out
}

// TestContainersAndProcessesGetNetworksOfCNI runs functions in the network of an operator's CNI
// plugins. They have its addresses, reach what it leads to, and the gateway. Their ends give the
// addresses back, also if up was killed.
func TestContainersAndProcessesGetNetworksOfCNI(t *testing.T) {
	number := map[string]int{runtimeProcess: 1, runtimeContainerd: 2}
	onEachRuntime(t, func(t *testing.T, start starter) {
		t.Helper()
		o := newOperatorsNetwork(t, number[filepath.Base(t.Name())])
		r := start(t, o.flags()...)
		script := shells("script")
		script.labels["min"], script.labels["max"] = "2", "2"
		r.deployAll(script, httpFn("web", one()))
		r.until(late, "two replicas", func() bool { return r.shows("script").AvailableReplicas == 2 && r.shows("web").AvailableReplicas == 1 })
		if got := o.taken(); len(got) != 3 {
			t.Errorf("%q are taken, want an address per replica", got)
		}
		run := func(line string) string {
			t.Helper()
			return string(r.must(http.StatusOK, http.MethodPost, "/function/script", line+"\nexit 0\n").Body)
		}
		own := regexp.MustCompile(`\b` + regexp.QuoteMeta(o.subnet) + `\.\d+\b`)
		var addresses []string
		for _, watchdog := range proctest.Children(t, r.up.Cmd.Process.Pid) {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/fib_trie", watchdog))
			if err != nil {
				t.Fatal(err)
			}
			addresses = append(addresses, slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(own.FindAllString(string(b), -1)))), func(a string) bool {
				return !slices.Contains(o.taken(), a) // that of the subnet itself
			})...)
		}
		slices.Sort(addresses)
		if !slices.Equal(addresses, o.taken()) {
			t.Errorf("replicas have %q, want each of %q once", addresses, o.taken())
		}
		l, err := net.Listen("tcp", o.subnet+".1:0") // of the operator's bridge
		if err != nil {
			t.Fatal(err)
		}
		outside := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "from ", r.RemoteAddr) }))
		outside.Listener.Close()
		outside.Listener = l
		outside.Start()
		t.Cleanup(outside.Close)
		const get = "curl -sS --max-time 60 "
		if got := run(get + "http://" + l.Addr().String() + " 2>&1"); !strings.HasPrefix(got, "from "+o.subnet+".") {
			t.Errorf("outside sees %q, want an address of the operator's network", got)
		}
		if got := run(get + "-d x -o /dev/null -w '%{http_code}' http://gateway.openfaas:8080/function/web 2>&1"); got != "200" {
			t.Errorf("the gateway answers %q, want 200", got)
		}
		if got := run(get + "http://169.254.169.254/ 2>&1"); !strings.Contains(got, "efused") && !strings.Contains(got, "Failed to connect") && !strings.Contains(got, "Couldn't connect") {
			t.Errorf("the metadata of a cloud: %q, want it refused", got)
		}
		r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"script"}`)
		r.until(late, "the addresses of a removed function to be given back", func() bool { return len(o.taken()) == 1 })
		before := o.taken()
		r.kill()
		if got := o.taken(); len(got) != 1 {
			t.Errorf("%q are taken after up was killed, want what the next up gives back", got)
		}
		r.restart()
		r.until(late, "another address", func() bool {
			now := o.taken()
			return len(now) == 1 && now[0] != before[0] && r.shows("web").AvailableReplicas == 1
		})
		r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"web"}`)
		r.until(late, "nothing to be left", func() bool { return len(o.left()) == 0 })
	})
}

// TestNextDaemonGivesBackNetworksOfCNI kills a node's daemon, and then the daemon with its warden.
// The next daemon keeps the network of the replica that it adopts, and gives back that of the one
// that has ended.
func TestNextDaemonGivesBackNetworksOfCNI(t *testing.T) {
	t.Parallel()
	o := newOperatorsNetwork(t, 3)
	n := startNodes(t, "--no-node")
	d := n.daemon("n1", o.flags()...)
	n.deployAll(httpFn("web", one()))
	n.steady("web", 1, "n1")
	before := o.taken()
	if len(before) != 1 {
		t.Fatalf("%q are taken, want one address", before)
	}
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	n.restartDaemon(d)
	n.steady("web", 1, "n1")
	n.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	if now := o.taken(); !slices.Equal(now, before) {
		t.Errorf("%q are taken after the daemon's end, want %q", now, before)
	}
	replica := n.processes("n1")
	warden := wardenOf(t, d.state)
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	kill9(t, warden)
	gone(t, replica)
	if now := o.taken(); !slices.Equal(now, before) {
		t.Errorf("%q are taken after the warden's end, want %q", now, before)
	}
	n.restartDaemon(d)
	n.until(late, "another address in place of the first", func() bool {
		now := o.taken()
		return len(now) == 1 && now[0] != before[0]
	})
	n.steady("web", 1, "n1")
	n.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	n.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"web"}`)
	n.until(late, "nothing to be left", func() bool { return len(o.left()) == 0 })
}
