package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestBurstForksInOneContainer sends a burst to a function with parameters. All its replicas are
// forks in one container, each in a cgroup of its own. Then the function goes to zero and comes
// back.
func TestBurstForksInOneContainer(t *testing.T) {
	needGroups(t)
	t.Parallel()
	r := startContained(t)
	f := waitFn("burst", "200ms", map[string]string{"min": "0", "max": "6", "zero": "true", "zero-duration": "5s"}, nil)
	f.env["max_inflight"] = "1"
	r.deployAll(f)
	r.must(http.StatusOK, http.MethodPost, "/function/burst", "x")
	l := r.load(12, "/function/burst", waited)
	r.until(late, "six replicas", func() bool { return r.shows("burst").AvailableReplicas == 6 })
	pids := r.pids("wait", false)
	c := r.containers()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	if len(c) != 1 || !strings.HasPrefix(c[0], "burst-openfaas-fn-") {
		t.Errorf("containers %v, want one, of burst", c)
	}
	groups := map[string]bool{}
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			t.Fatal(err)
		}
		groups[regexp.MustCompile(`(?m)^\d+:memory:(.*)$|^0::(.*)$`).FindString(string(b))] = true
	}
	if len(pids) != 6 || len(groups) != 6 {
		t.Errorf("%d replicas in %d cgroups, want six in one each: %v", len(pids), len(groups), groups)
	}
	forks := 0
	for _, e := range r.events("burst", "started") {
		if e.Path == keysmanager.PathFork {
			forks++
		}
	}
	if forks < 6 {
		t.Errorf("%d forks, want one per replica", forks)
	}
	r.until(late, "no replica", func() bool { return r.shows("burst").Replicas == 0 && len(r.pids("wait", false)) == 0 })
	r.must(http.StatusOK, http.MethodPost, "/function/burst", "x")
	if again := r.containers(); !slices.Equal(again, c) {
		t.Errorf("containers %v after zero, want the zygote's still: %v", again, c)
	}
	t.Logf("%d requests, %d forks", requests, forks)
}

// containers returns the ids of the containers of the rig's containerd.
func (r *rig) containers() (ids []string) {
	r.t.Helper()
	all, err := r.ctr.Client(r.ctr.Namespace).Containers(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, c := range all {
		ids = append(ids, c.ID())
	}
	return ids
}

// TestContainersOfFunctionsWithRoots runs functions whose images are folders, and images with a
// root of their own, in the network of HTTP functions. Each replica has a container.
func TestContainersOfFunctionsWithRoots(t *testing.T) {
	t.Parallel()
	r := startContained(t, "--images", answeringImages(t), "--allow-host-network")
	host := answeringFn("in-the-host-network", "test/template", one(), "template_port", freePort(t))
	host.env["upstream_url"] = "http://127.0.0.1:" + host.env["template_port"]
	host.annotations = map[string]string{"network": "host"}
	r.deployTogether([]fn{host})
	if got, want := string(r.must(http.StatusOK, http.MethodGet, "/function/"+host.name, "").Body), host.name+" 1"; got != want {
		t.Errorf("%s answers %q, want %q", host.name, got, want)
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", fmt.Sprintf(`{"functionName":%q}`, host.name))
	r.until(soon, "its container to be gone", func() bool { return len(r.containers()) == 0 })
	var fns []fn
	for _, image := range []string{"test/template", "rooted/template", "test/stubborn", "rooted/stubborn"} {
		f := answeringFn(strings.ReplaceAll(image, "/", "-"), image, map[string]string{"min": "2", "max": "2"})
		if strings.HasSuffix(image, "/template") {
			f.env["template_port"], f.env["upstream_url"] = "5000", "http://127.0.0.1:5000"
		}
		fns = append(fns, f)
	}
	r.deployTogether(fns)
	r.settled(2, fns)
	for _, f := range fns {
		if got, want := string(r.must(http.StatusOK, http.MethodGet, "/function/"+f.name, "").Body), f.name+" 1"; got != want {
			t.Errorf("%s answers %q, want %q", f.name, got, want)
		}
	}
	if all := r.containers(); len(all) != 8 {
		t.Errorf("containers %v, want one per replica", all)
	}
	if links := r.links(); len(links) != 8 {
		t.Errorf("links %v, want one per replica", links)
	}
}

// links returns the links of this machine to the network namespaces of up's replicas.
func (r *rig) links() (names []string) {
	r.t.Helper()
	owners, err := filepath.Glob("/run/stagecoach/networks/*/owner")
	if err != nil {
		r.t.Fatal(err)
	}
	for _, file := range owners {
		b, err := os.ReadFile(file)
		var of struct{ Owner string }
		if err != nil || json.Unmarshal(b, &of) != nil || of.Owner != "up "+r.state {
			continue
		}
		slice := net.ParseIP(strings.Split(filepath.Base(filepath.Dir(file)), "_")[0]).To4()
		all, err := net.Interfaces()
		if err != nil {
			r.t.Fatal(err)
		}
		prefix := fmt.Sprintf("sgc%x", []byte(slice))[:len("sgc")+5] // a slice has 20 bits
		for _, i := range all {
			if strings.HasPrefix(i.Name, prefix) {
				names = append(names, i.Name)
			}
		}
		return names
	}
	r.t.Fatalf("no network is up's: %v", owners)
	return nil
}

// TestEndsHaveTheSameWords ends functions in all ways, in processes and in containers. Callers,
// events and logs get the same words from both.
func TestEndsHaveTheSameWords(t *testing.T) {
	needGroups(t)
	t.Parallel()
	said := map[string][]string{}
	for name, start := range map[string]starter{runtimeProcess: start, runtimeContainerd: startContained} {
		t.Run(name, func(t *testing.T) { said[name] = ends(t, start) })
	}
	for i, want := range said[runtimeProcess] {
		if t.Failed() {
			break
		}
		if got := said[runtimeContainerd][i]; got != want {
			t.Errorf("a container says\n%s\nand a process\n%s", got, want)
		}
	}
}

// ends ends functions in all ways, and returns what is said about the ends.
func ends(t *testing.T, start starter) (said []string) {
	r := start(t)
	small := shells("small").deployment()
	small.Limits = &client.Resources{Memory: "64Mi"}
	if err := r.Deploy(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	r.limited("eats", client.Resources{Memory: "96Mi"})
	r.deployAll(
		shells("script"), httpFn("web", one()), httpFn("brief", one(), "exec_timeout", "300ms"),
		fn{"missing", "echo-http", one(), nil, map[string]string{"fprocess": "./no-such-program", "mode": "http"}},
		waitFn("hold", "1m", one(), map[string]string{"idempotent": "false"}),
		fn{"bare", "noop", one(), nil, nil},
	)
	for _, c := range []struct{ path, body, want string }{
		{"script", "echo the reason >&2; exit 3", "exit status 3"},
		{"script", "echo first >&2; echo last words >&2; kill -9 $$", "killed by SIGKILL"},
		{"script", "kill -TERM $$", "killed by SIGTERM"},
		{"small", "exec python3 -c 'bytearray(200 << 20)'", "killed: out of memory, its limit is 64 MiB (limits.memory)"},
		{"eats/eat?mb=512", "", "killed: out of memory, its limit is 96 MiB (limits.memory)"},
		{"web/exit", "", "exit status"},
		{"web/panic", "", ""},
		{"brief/slow?for=1m&name=brief", "x", "exec_timeout, 300ms"},
	} {
		a := r.send(http.MethodPost, "/function/"+c.path, c.body, "X-Timeout", "2m")
		if a.Status < 500 || !strings.Contains(string(a.Body), c.want) {
			t.Errorf("%s: status %d: %s, want %q", c.path, a.Status, a.Body, c.want)
		}
		said = append(said, fmt.Sprintf("%s %s: %d %s", c.path, c.body, a.Status, varying.ReplaceAll(a.Body, nil)))
	}
	got := make(chan client.Answer, 1)
	go func() { got <- r.send(http.MethodPost, "/function/hold", "x", "X-Timeout", "2m") }()
	r.until(soon, "the call to run", func() bool { return r.line("hold").Running == 1 })
	kill9(t, r.pids("wait", false)[0])
	a := <-got
	said = append(said, fmt.Sprintf("hold: %d %s", a.Status, varying.ReplaceAll(a.Body, nil)))
	r.until(soon, "a replica of bare", func() bool { return len(r.pids("noop", false)) == 1 })
	kill9(t, r.pids("noop", false)[0])
	for _, name := range []string{"hold", "bare", "eats"} {
		r.until(soon, name+" to have lost a replica", func() bool { return len(r.events(name, "lost")) > 0 })
		said = append(said, name+" lost: "+r.events(name, "lost")[0].Cause)
	}
	var s client.FunctionStatus
	r.until(soon, "missing to fail", func() bool { s = r.shows("missing"); return s.LastFailure() != "" })
	// What follows depends on whether the socket is read before or after the end is known.
	why, _, _ := strings.Cut(varying.ReplaceAllString(s.LastFailure(), ""), "no such file or directory")
	said = append(said, "missing: "+why)
	return said
}

// varying matches what differs between two runs: names of replicas, which have a random end, and
// times in the lines of a log. A failed start also says that it was in a container.
var varying = regexp.MustCompile(`, in a container|\d{4}-\d\d-\d\dT[\d:.]+Z|\d{4}/\d\d/\d\d \d\d:\d\d:\d\d|\b(script|small|eats|web|brief|missing|hold|bare)-[0-9a-z]+(-[0-9a-z]+)*\b`)

// TestContainersAreFoundByLabels reads the labels of containers, as operators and their tools do.
func TestContainersAreFoundByLabels(t *testing.T) {
	t.Parallel()
	r := startContained(t)
	r.deployAll(fn{"bare", "noop", one(), nil, nil}, waitFn("hold", "1ms", one(), nil), httpFn("web", one()))
	for _, f := range []string{"bare", "hold", "web"} {
		r.must(http.StatusOK, http.MethodPost, "/function/"+f, "x")
	}
	all, err := r.ctr.Client(r.ctr.Namespace).Containers(t.Context(), fmt.Sprintf("labels.%q==%q", "stagecoach.dev/node", nodeID(r.node(), r.state)))
	if err != nil {
		t.Fatal(err)
	}
	var functions []string
	for _, c := range all {
		labels, err := c.Labels(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		functions = append(functions, labels["stagecoach.dev/function"])
		if labels["stagecoach.dev/replica"] == "" {
			t.Errorf("labels %v of %s, want a replica", labels, c.ID())
		}
		task, err := c.Task(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, pid := range proctest.Children(t, int(task.Pid())) {
			if p, err := readProcess(pid); err != nil || !slices.Contains([]string{"noop", "wait", "echo-http"}, p.image) {
				t.Errorf("the program of %s is %+v, %v", c.ID(), p, err)
			}
		}
	}
	slices.Sort(functions)
	if want := []string{"bare.openfaas-fn", "hold.openfaas-fn", "web.openfaas-fn"}; !slices.Equal(functions, want) {
		t.Errorf("containers of %v, want %v", functions, want)
	}
}
