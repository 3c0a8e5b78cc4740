package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// configFile writes a configuration file and returns the flags that name it.
func configFile(t *testing.T, text string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--config", file}
}

// fails is a command that has to end with exit status 1 and print what matches want.
func (c *operator) fails(want string, args ...string) string {
	c.t.Helper()
	out, err := c.try("", args...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !regexp.MustCompile(want).MatchString(out) {
		c.t.Errorf("stagecoach %q: %v, printed %q, want exit status 1 and %q", args, err, out, want)
	}
	return out
}

// TestDeployWaitTellsWhyARevisionFails updates a function with releases that cannot start. deploy
// --wait must end with status 1 and print the cause. list and the API must say that the function
// fails, and the old revision must continue to serve. A good release must end the failure. If the
// function sleeps, it is woken to try the release.
func TestDeployWaitTellsWhyARevisionFails(t *testing.T) {
	t.Parallel()
	r := start(t, configFile(t, "control: {startTimeout: 15s}\n")...)
	c := &operator{t, t.TempDir(), r.Base}
	release := func(process, upstream string, labels string) {
		c.write("stack.yml", fmt.Sprintf(`version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  web:
    lang: dockerfile
    handler: .
    image: stagecoach/echo-http:0.1.0
    fprocess: %q
    environment: {mode: http, upstream_url: %q}
    labels: {%s}
`, process, upstream, labels))
	}
	serves := func(when string) {
		t.Helper()
		if a := r.send(http.MethodPost, "/function/web/echo", "hello"); a.Status != http.StatusOK || string(a.Body) != "hello" {
			t.Errorf("%s: status %d %.300s, want the old revision's answer", when, a.Status, a.Body)
		}
	}
	const good, awake = "./echo-http", `com.openfaas.scale.max: "1"`
	release(good, "", awake)
	c.run(`web: created.*\nweb: ready with 1 replicas`, "", "deploy", "--wait")
	c.run(`FUNCTION +IMAGE +INVOCATIONS +REPLICAS +STATUS\nweb +stagecoach/echo-http:0.1.0 +0 +1/1 +ready\n`, "", "list")
	for _, bad := range []struct{ process, upstream, cause string }{
		{"./no-such-program", "", "no-such-program"},
		{"python3 -m no_such_module", "", "it ended with exit status 1"},
		{good, "http://127.0.0.1:1", "not ready within 15s"},
	} {
		release(bad.process, bad.upstream, awake)
		words := c.fails("web: failing: .*"+bad.cause, "deploy", "--wait")
		if strings.HasPrefix(bad.process, "python3") && !strings.Contains(words, "No module named no_such_module") {
			t.Errorf("printed %s, want what the program said last", words)
		}
		serves(bad.process)
		c.run(`web +stagecoach/echo-http:0.1.0 +\d+ +0/1 +failing: `, "", "list")
		c.run(`Replicas: +1, 0 ready\n(?s:.*)web-\S+ on \S+: ready, of an older revision(?s:.*)Status: +failing: .*`+bad.cause, "", "describe", "web")
		var all []client.FunctionStatus
		if a := r.must(http.StatusOK, http.MethodGet, "/system/functions", ""); json.Unmarshal(a.Body, &all) != nil || len(all) != 1 ||
			all[0].Replicas != 1 || all[0].AvailableReplicas != 0 || !all[0].In(provider.StatusFailing) {
			t.Errorf("the API says %s, want one replica, none available, failing", a.Body)
		}
	}
	release(good, "", awake)
	c.run(`web: ready with 1 replicas`, "", "deploy", "--wait")
	serves("the new revision")
	c.run(`web +stagecoach/echo-http:0.1.0 +\d+ +1/1 +ready\n`, "", "list")

	const sleeps = `com.openfaas.scale.min: "0", com.openfaas.scale.zero: "true"`
	c.run("web: removed", "", "remove", "web")
	release("./no-such-program", "", sleeps)
	c.fails("web: failing: .*no-such-program", "deploy", "--wait")
	c.run("web: removed", "", "remove", "web") // which the last deploy has woken
	release(good, "", sleeps)
	c.run("web: starts, seen after .*; asleep again", "", "deploy", "--wait")
	c.run(`web +stagecoach/echo-http:0.1.0 +\d+ +0/0 +asleep\n`, "", "list")
	serves("woken")
}

// TestFirstListing checks that the first listing after a deploy, an update, a scaling or a restart
// has the right number of wanted replicas.
func TestFirstListing(t *testing.T) {
	t.Parallel()
	r := start(t)
	lists := func(when, name string, want int) {
		t.Helper()
		if s := r.shows(name); s.Replicas != want || s.AvailableReplicas > want {
			t.Errorf("%s: %d replicas of %s, %d available, want %d", when, s.Replicas, name, s.AvailableReplicas, want)
		}
	}
	const functions = 8
	name := func(i int) string { return fmt.Sprint("n", i) }
	least := func(i int) int { return 1 + i%3 }
	f := func(i, least int) fn {
		return fn{name(i), "noop", map[string]string{"min": fmt.Sprint(least), "max": "6"}, nil, nil}
	}
	for i := range functions {
		r.deployAll(f(i, least(i)))
		lists("deployed", name(i), least(i))
	}
	for i := range functions {
		r.deployAll(f(i, least(i)+1))
		lists("updated", name(i), least(i)+1)
	}
	for i := range functions {
		r.must(http.StatusAccepted, http.MethodPost, "/system/scale-function/"+name(i), fmt.Sprintf(`{"serviceName":%q,"replicas":5}`, name(i)))
		lists("scaled", name(i), 5)
	}
	r.until(soon, "a replica", func() bool { return r.shows(name(0)).AvailableReplicas > 0 })
	r.kill()
	r.restart()
	for i := range functions {
		lists("restarted", name(i), least(i)+1)
	}
}

// TestInvocationsThroughPipelines checks that the invocations of a stage include the calls through
// its pipeline, one per item.
func TestInvocationsThroughPipelines(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(
		fn{"first", "noop", nil, map[string]string{"pipeline": "both", "next": "second"}, nil},
		fn{"second", "noop", nil, map[string]string{"pipeline": "both", "each": "true"}, nil},
	)
	for range 3 {
		r.must(http.StatusOK, http.MethodPost, "/function/both", `["a","b"]`, "Content-Type", "application/json")
	}
	r.must(http.StatusOK, http.MethodPost, "/function/second", "x")
	if first, second := r.shows("first").InvocationCount, r.shows("second").InvocationCount; first != 3 || second != 7 {
		t.Errorf("%g calls of the first stage, %g of the second, want 3 and 7", first, second)
	}
}

// TestDeployRefusesWhatNoNodeCanHold checks functions that need more than any node has. A deploy is
// refused with the field and with what the largest node has. If the node shrinks after a deploy,
// requests for the function are answered at once, with the cause.
func TestDeployRefusesWhatNoNodeCanHold(t *testing.T) {
	t.Parallel()
	flags := configFile(t, "node: {memory: 4Gi}\n")
	r := start(t, flags...)
	deploys := func(name, fields string) client.Answer {
		return r.send(http.MethodPost, "/system/functions", fmt.Sprintf(`{"service":%q,"image":"stagecoach/noop:0.1.0",%s}`, name, fields))
	}
	for fields, want := range map[string]string{
		`"limits":{"memory":"500000Gi"}`:                                  `limits.memory: got "500000Gi": a replica needs 500000 GiB of memory, want .*the largest node, .*, has `,
		`"limits":{"memory":"500000Gi"},"requests":{"memory":"400000Gi"}`: `requests.memory: got "400000Gi"`,
		`"limits":{"cpu":"1000"}`:                                         `limits.cpu: got "1000": a replica needs 1000000m of a processor`,
		`"annotations":{"stagecoach.dev/gpu":"64"}`:                       `annotations\["stagecoach.dev/gpu"\]: got "64": a replica needs 64 devices`,
	} {
		if a := deploys("large", fields); a.Status != http.StatusBadRequest || !regexp.MustCompile(want).Match(a.Body) {
			t.Errorf("%s: status %d %s, want 400 and %s", fields, a.Status, a.Body, want)
		}
	}
	r.must(http.StatusNotFound, http.MethodGet, "/system/function/large", "")
	if a := deploys("fits", `"requests":{"memory":"2Gi"}`); a.Status != http.StatusAccepted {
		t.Fatalf("status %d %s, want 202", a.Status, a.Body)
	}
	r.must(http.StatusOK, http.MethodPost, "/function/fits", "x")
	r.stop()
	if err := os.WriteFile(flags[1], []byte("node: {memory: 1Gi}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.restart()
	const deadline = 5 * time.Minute // nobody waits for it
	a := r.send(http.MethodPost, "/function/fits", "x", "X-Timeout", deadline.String())
	if a.Status != http.StatusServiceUnavailable || !strings.Contains(string(a.Body), "no node could hold one: it needs 2 GiB of memory") || a.Header.Get("X-OpenFaaS-Internal") == "" {
		t.Errorf("status %d %s, want 503 and why it has no place", a.Status, a.Body)
	}
	if s := r.shows("fits"); s.Replicas != 1 || s.AvailableReplicas != 0 || !strings.HasPrefix(s.Status(), "failing: has no replica, and no node could hold one: ") {
		t.Errorf("%+v, want one replica that cannot be had", s)
	}
}
