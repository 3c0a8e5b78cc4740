package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// The programs of ./testdata whose answers name their function and revision.
var answering = []string{"template", "stubborn", "ofwatchdog"}

// answeringImages returns a folder of images with these programs. Each program has two images: the
// folder test/NAME:1, and rooted/NAME:1, which has its own root.
func answeringImages(t *testing.T) string {
	t.Helper()
	images := t.TempDir()
	store, err := image.OpenStore(image.Folder(images))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	for _, name := range answering {
		dir := filepath.Join(images, "test", name, "1")
		build := exec.Command("go", "build", "-o", filepath.Join(dir, name), "./testdata/"+name)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
		img, err := image.Pack(dir, image.Config{Entrypoint: []string{"/" + name}, User: "1000"})
		if err == nil {
			_, err = store.Add(t.Context(), img, "rooted/"+name+":1")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return images
}

// answeringFn is a function of one of these images, such as test/template.
func answeringFn(name, image string, labels map[string]string, env ...string) fn {
	f := fn{name, image + ":1", labels, nil, map[string]string{
		"mode": "http", "fprocess": "./" + filepath.Base(image), "function_name": name, "revision": "1",
	}}
	if strings.HasPrefix(image, "rooted/") {
		f.env["fprocess"] = "/" + filepath.Base(image)
	}
	for i := 0; i < len(env); i += 2 {
		f.env[env[i]] = env[i+1]
	}
	return f
}

// callers call functions all the time over connections that stay open, and check which function has
// answered.
type callers struct {
	stop, wake chan struct{}
	over       sync.Once
	wg         sync.WaitGroup
	client     http.Client
	base       atomic.Pointer[string]
	oldest     map[string]*atomic.Int64 // by function: the oldest revision that may still answer

	mu       sync.Mutex
	answered map[string]int // by function
	failed   map[int]int    // by status; 0: none came
	wrong    []string
}

// call begins with n callers for each function, which end with the test if not before.
func (r *rig) call(n int, functions ...string) *callers {
	c := &callers{
		stop: make(chan struct{}), wake: make(chan struct{}), client: http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: n * len(functions)}},
		oldest: map[string]*atomic.Int64{}, answered: map[string]int{}, failed: map[int]int{},
	}
	r.t.Cleanup(func() { c.end(r.t) })
	c.base.Store(&r.Base)
	for _, f := range functions {
		c.oldest[f] = &atomic.Int64{}
	}
	for _, f := range functions {
		for range n {
			c.wg.Go(func() {
				for {
					select {
					case <-c.stop:
						return
					default:
						c.once(f)
					}
				}
			})
		}
	}
	return c
}

// once sends one request. Where nobody listens it waits until there is another gateway.
func (c *callers) once(function string) {
	oldest := c.oldest[function].Load()
	c.mu.Lock()
	wake := c.wake
	c.mu.Unlock()
	resp, err := c.client.Get(*c.base.Load() + "/function/" + function)
	status, body := 0, []byte(nil)
	if err == nil {
		body, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		status = resp.StatusCode
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || status != http.StatusOK {
		c.failed[status]++
		if errors.Is(err, unix.ECONNREFUSED) {
			c.mu.Unlock()
			select {
			case <-wake:
			case <-c.stop:
			}
			c.mu.Lock()
		}
		return
	}
	c.answered[function]++
	var name string
	var revision int64
	if _, err := fmt.Sscan(string(body), &name, &revision); err != nil || name != function || revision < oldest {
		c.wrong = append(c.wrong, fmt.Sprintf("%s, from revision %d on: %q", function, oldest, body))
	}
}

// moved tells the callers where the gateway is.
func (c *callers) moved(base string) {
	c.base.Store(&base)
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.wake)
	c.wake = make(chan struct{})
}

// more waits until there are n more answers of each function.
func (c *callers) more(t *testing.T, n int) {
	t.Helper()
	count := func() map[string]int {
		c.mu.Lock()
		defer c.mu.Unlock()
		all := map[string]int{}
		for f := range c.oldest {
			all[f] = c.answered[f]
		}
		return all
	}
	before := count()
	proctest.Until(t, "answers of each function", func() bool {
		for f, answers := range count() {
			if answers < before[f]+n {
				return false
			}
		}
		return true
	})
}

// total is how many answers there were.
func (c *callers) total() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, answers := range c.answered {
		n += answers
	}
	return n
}

// reach waits until there are n answers. It has no limit as long as answers come.
func (c *callers) reach(t *testing.T, n int) {
	t.Helper()
	for is := c.total(); is < n; is = c.total() {
		proctest.Until(t, "more answers", func() bool { return c.total() > is })
	}
}

// end stops the callers, and fails the test for each answer of another function. Further calls do
// nothing.
func (c *callers) end(t *testing.T) {
	t.Helper()
	c.over.Do(func() {
		close(c.stop)
		c.wg.Wait()
		c.client.CloseIdleConnections()
		for _, w := range c.wrong[:min(len(c.wrong), 10)] {
			t.Errorf("misrouted: %s", w)
		}
		t.Logf("%d answers %v, %d misrouted, failures by status %v", c.total(), c.answered, len(c.wrong), c.failed)
	})
}

// freePort returns a port that nobody listens on, and that nobody else gets before the test ends.
func freePort(t *testing.T) string {
	t.Helper()
	return strconv.Itoa(proctest.Ports(t, 1)[0])
}

// deployTogether deploys functions at the same time.
func (r *rig) deployTogether(fns []fn) {
	r.t.Helper()
	errs := make(chan error, len(fns))
	for _, f := range fns {
		go func() { errs <- r.Deploy(context.Background(), f.deployment()) }()
	}
	for range fns {
		if err := <-errs; err != nil {
			r.t.Error(err)
		}
	}
}

// settled waits until each function has n replicas, and all of them are ready.
func (r *rig) settled(n int, fns []fn) {
	r.t.Helper()
	for _, f := range fns {
		r.until(late, fmt.Sprintf("%d replicas of %s", n, f.name), func() bool {
			s := r.shows(f.name)
			return s.Replicas == n && s.AvailableReplicas == n
		})
	}
}

// TestFunctionsOfOneTemplate deploys three functions with three replicas each. All their programs
// listen on the same port. Calls go on while the functions are updated, their replicas are killed
// and `up` is restarted. Each answer must come from the called function, and never from a revision
// that was replaced before the call.
func TestFunctionsOfOneTemplate(t *testing.T) {
	needRoot(t)
	images := answeringImages(t)
	for _, kind := range []string{"test", "rooted"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := start(t, "--images", images)
			var fns []fn
			for _, name := range []string{"one", "two", "three"} {
				fns = append(fns, answeringFn(name, kind+"/template", map[string]string{"min": "3", "max": "3"}, "template_port", "5000", "upstream_url", "http://127.0.0.1:5000"))
			}
			r.deployTogether(fns)
			c := r.call(2, "one", "two", "three")
			r.settled(3, fns)
			c.more(t, 100)
			for revision := int64(2); revision <= 3; revision++ {
				stopped := map[string]int{}
				for i, f := range fns {
					stopped[f.name] = len(r.events(f.name, "stopped"))
					fns[i] = answeringFn(f.name, kind+"/template", f.labels, "template_port", "5000", "upstream_url", "http://127.0.0.1:5000", "revision", fmt.Sprint(revision))
				}
				r.deployTogether(fns)
				for _, f := range fns {
					r.until(late, "the new revision alone", func() bool {
						s := r.shows(f.name)
						return s.Replicas == 3 && s.AvailableReplicas == 3 && len(r.events(f.name, "stopped")) >= stopped[f.name]+3
					})
					c.oldest[f.name].Store(revision)
				}
				c.more(t, 100)
				r.killSome(t)
				c.more(t, 100)
				r.settled(3, fns)
				if revision == 2 {
					r.stop()
					r.restart()
					c.moved(r.Base)
					c.more(t, 100)
				}
			}
			c.reach(t, 5000) // 10,000 in both kinds of images together
			c.end(t)
		})
	}
}

// killSome kills a replica's watchdog and the program of another one.
func (r *rig) killSome(t *testing.T) {
	t.Helper()
	var watchdogs []process
	for _, p := range r.descendants() {
		if children := proctest.Children(t, p.pid); len(children) == 1 {
			watchdogs = append(watchdogs, p)
		}
	}
	if len(watchdogs) < 2 {
		t.Fatalf("%d watchdogs with a program, want two to kill", len(watchdogs))
	}
	kill9(t, watchdogs[0].pid)
	kill9(t, proctest.Children(t, watchdogs[1].pid)[0])
}

// TestImagesOnTheSamePorts runs functions side by side whose images listen on the same ports, 8080
// or 8080 and 8081, whatever their configuration.
func TestImagesOnTheSamePorts(t *testing.T) {
	needRoot(t)
	t.Parallel()
	r := start(t, "--images", answeringImages(t))
	var fns []fn
	var names []string
	for _, image := range []string{"test/stubborn", "rooted/stubborn", "test/ofwatchdog", "rooted/ofwatchdog"} {
		for i := range 3 {
			name := fmt.Sprintf("%s-%d", strings.ReplaceAll(image, "/", "-"), i)
			fns = append(fns, answeringFn(name, image, map[string]string{"min": "1", "max": "1"}))
			names = append(names, name)
		}
	}
	r.deployTogether(fns)
	r.settled(1, fns)
	c := r.call(1, names...)
	c.more(t, 50)
	c.end(t)
}

// TestOnePortOfTheMachine deploys three functions that listen on the same port of the machine's
// network. One becomes ready, and all answers come from it. The others report which process has the
// port, even if their programs keep running. An update of the ready function does not get the port
// either while the old revision has it.
func TestOnePortOfTheMachine(t *testing.T) {
	t.Parallel()
	for _, stays := range []string{"yes", ""} {
		r := start(t, "--images", answeringImages(t), "--allow-host-network")
		port, image := freePort(t), "test/template"
		if stays == "" && os.Geteuid() == 0 {
			image = "rooted/template" // whose processes are in a session of their own
		}
		var fns []fn
		for _, name := range []string{"one", "two", "three"} {
			f := answeringFn(name, image, map[string]string{"min": "1", "max": "1"},
				"template_port", port, "upstream_url", "http://127.0.0.1:"+port, "stays", stays)
			f.annotations = map[string]string{"network": "host"}
			fns = append(fns, f)
		}
		c := r.call(1, "one", "two", "three")
		r.deployTogether(fns)
		var winner string
		r.until(soon, "a function that is ready", func() bool {
			for _, f := range fns {
				if r.shows(f.name).AvailableReplicas == 1 {
					winner = f.name
				}
			}
			return winner != ""
		})
		taken := fmt.Sprintf(`http://127.0.0.1:%s is taken by function "%s.openfaas-fn", process `, port, winner)
		for i, f := range fns {
			if f.name == winner {
				fns[i].env["revision"] = "2"
				continue
			}
			r.until(late, "the reason why "+f.name+" is not ready", func() bool {
				for _, e := range r.events(f.name, "failed") {
					if strings.Contains(e.Cause, taken) {
						return true
					}
				}
				return false
			})
			if n := r.shows(f.name).AvailableReplicas; n != 0 {
				t.Errorf("%d replicas of %s are ready, want none beside %s", n, f.name, winner)
			}
		}
		r.deployTogether(fns)
		r.until(late, "the reason why the update is not ready", func() bool {
			for _, e := range r.events(winner, "failed") {
				if strings.Contains(e.Cause, taken) {
					return true
				}
			}
			return false
		})
		c.reach(t, 1000)
		c.end(t)
		if c.answered[winner] != c.total() {
			t.Errorf("%v, want answers of %s alone", c.answered, winner)
		}
	}
}

// TestFailureNamesTheOtherPort has a program that is not ready, because it listens on another port
// than expected. The cause of the failure names that port.
func TestFailureNamesTheOtherPort(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yml")
	if err := os.WriteFile(config, []byte("control: {startTimeout: 5s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	onEachRuntime(t, func(t *testing.T, start starter) {
		r := start(t, "--images", answeringImages(t), "--config", config)
		port := freePort(t)
		r.deployAll(answeringFn("elsewhere", "test/template", map[string]string{"min": "1", "max": "1"}, "template_port", port))
		want := fmt.Sprintf("or say upstream_url=http://127.0.0.1:%s", port)
		r.until(late, "the reason why it is not ready", func() bool {
			// On a busy machine, a start may be given up before the program listens.
			return slices.ContainsFunc(r.events("elsewhere", "failed"), func(e schema.Event) bool {
				return strings.Contains(e.Cause, "not ready within 5s") && strings.Contains(e.Cause, "it listens on "+port+"; want ") && strings.Contains(e.Cause, want)
			})
		})
	})
}
