package pods

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// lister is an API server with pods of the namespace fn, which can be listed and deleted.
type lister struct {
	mu   sync.Mutex
	pods map[string]map[string]string // labels by name
	bad  int                          // requests that fail before the others
}

// ServeHTTP implements http.Handler.
func (l *lister) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bad > 0 {
		l.bad--
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	name := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/api/v1/namespaces/fn/pods"), "/")
	if r.Method == http.MethodDelete {
		delete(l.pods, name)
		_, _ = w.Write([]byte("{}"))
		return
	}
	var list struct {
		Items []kube.Pod `json:"items"`
	}
	for name, labels := range l.pods {
		wanted := true
		for part := range strings.SplitSeq(r.URL.Query().Get("labelSelector"), ",") {
			key, value, _ := strings.Cut(part, "=")
			wanted = wanted && labels[key] == value
		}
		if wanted {
			list.Items = append(list.Items, kube.Pod{Metadata: kube.Meta{Name: name, Labels: labels}})
		}
	}
	_ = json.NewEncoder(w).Encode(list)
}

func (l *lister) names() (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.pods {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// TestPodsOfAWatchdogEndWithIt checks that the pods of a watchdog that was killed are deleted, even
// if the API server fails at first. Other pods stay.
func TestPodsOfAWatchdogEndWithIt(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	l := &lister{pods: map[string]map[string]string{}}
	r, err := Open(Config{Cluster: clientOf(t, l), Machine: "m", Namespaces: []string{"fn"}, Named: named, Folder: t.TempDir(), Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c := sandbox.Command{Dir: "/", Argv: []string{"sleep", "1000"}, Env: map[string]string{"A": "1"}}
	c.Platform, c.Labels = true, map[string]string{sandbox.LabelFunction: "web.fn"}
	p, err := r.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/environ")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := bytes.Cut(environ, []byte(EnvRun+"="))
	run, _, _ := bytes.Cut(rest, []byte{0})
	if !ok || len(run) == 0 || c.Env[EnvRun] != "" {
		t.Fatalf("the watchdog has the environment %q", environ)
	}
	l.mu.Lock()
	l.pods["its"] = map[string]string{LabelMachine: "m", labelOwner: string(run)}
	l.pods["another's"] = map[string]string{LabelMachine: "m", labelOwner: "another"}
	l.pods["elsewhere"] = map[string]string{LabelMachine: "n", labelOwner: string(run)}
	l.bad = 1
	l.mu.Unlock()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.Wait()
	p.Forget()
	proctest.Until(t, "the pod to be deleted", func() bool { return !slices.Contains(l.names(), "its") })
	if got := l.names(); !slices.Equal(got, []string{"another's", "elsewhere"}) {
		t.Errorf("pods that are left: %q", got)
	}
	c.Labels[sandbox.LabelFunction] = "web.other"
	if _, err := r.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), `namespace "other"`) {
		t.Errorf("a function of another namespace: %v", err)
	}
}

// TestFunctionsThatPodsCannotHave checks what is refused before a pod is made.
func TestFunctionsThatPodsCannotHave(t *testing.T) {
	l := &lister{}
	r := &Runtime{cfg: Config{Cluster: clientOf(t, l), Namespaces: []string{"fn"}, Named: named}}
	for want, change := range map[string]func(*sandbox.Command){
		"gets no GPU":        func(c *sandbox.Command) { c.GPUs = true },
		"spare pods":         func(c *sandbox.Command) { c.Held = true },
		"CDI devices":        func(c *sandbox.Command) { c.Options.Devices = []string{"v/c=d"} },
		`namespace "others"`: func(c *sandbox.Command) { c.Labels[sandbox.LabelFunction] = "web.others" },
		"root /images/web":   func(c *sandbox.Command) { c.Labels[sandbox.LabelFunction] = "web.fn" },
	} {
		c := httpCommand()
		change(&c)
		if _, err := r.prepare(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// breaker is a lister whose creations break off: the pod is there, and nobody hears of it.
type breaker struct{ lister }

// ServeHTTP implements http.Handler.
func (b *breaker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		b.lister.ServeHTTP(w, r)
		return
	}
	var pod kube.Pod
	_ = json.NewDecoder(r.Body).Decode(&pod)
	b.mu.Lock()
	b.pods[pod.Metadata.Name] = pod.Metadata.Labels
	b.mu.Unlock()
	panic(http.ErrAbortHandler) // closes the connection
}

func TestPodsOfBrokenCreationsAreDeleted(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	b := &breaker{lister{pods: map[string]map[string]string{}}}
	r, err := Open(Config{Cluster: clientOf(t, b), Machine: "m", Namespaces: []string{"fn"}, Named: named, Folder: t.TempDir(), Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c := sandbox.Command{Dir: "/usr", Argv: []string{"/bin/true"}, Env: map[string]string{}, As: &sandbox.Account{UID: 1 << 30, GID: 1 << 30}}
	c.Labels = map[string]string{sandbox.LabelFunction: "web.fn", sandbox.LabelEntry: "replica-ABCDEFGHIJKL"}
	if _, err := r.Start(t.Context(), c); err == nil {
		t.Fatal("a pod whose creation was broken off has started")
	}
	proctest.Until(t, "no pod to be left", func() bool { return len(b.names()) == 0 })
}
