package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openfaas/faas-provider/types"
	sdk "github.com/openfaas/go-sdk"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// secrets returns the folder in a process's environment, and the files in it with their modes.
func secrets(t *testing.T, pid int) string {
	t.Helper()
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		t.Fatal(err)
	}
	folder := ""
	for v := range strings.SplitSeq(string(env), "\x00") {
		if dir, ok := strings.CutPrefix(v, envSecrets+"="); ok {
			folder = dir
		}
	}
	if folder == "" {
		return "no folder"
	}
	info, err := os.Stat(folder)
	if err != nil {
		t.Fatal(err)
	}
	out := []string{info.Mode().Perm().String()}
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if info, err = e.Info(); err != nil {
			t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s %s=%s", info.Mode().Perm(), e.Name(), b))
	}
	return strings.Join(out, " | ")
}

// TestSecretsReachFunctions checks that a function sees its secrets as files, also after a kill -9
// of `up`. If functions run as users of their own, the files are for the group of these secrets;
// otherwise they are for the user of `up`. The log never has the secrets. After they are deleted,
// no file in the state folder has them.
func TestSecretsReachFunctions(t *testing.T) {
	t.Parallel()
	r := start(t, "--log", "debug")
	const hidden = "hunter2-e2e"
	r.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"token","value":"`+hidden+`"}`)
	r.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"other","value":"not for it"}`)
	const deployment = `{"service":"reads","image":"stagecoach/noop:0.1.0","secrets":["token"],"labels":{"com.openfaas.scale.max":"1"}}`
	r.must(http.StatusAccepted, http.MethodPost, "/system/functions", deployment)
	sees := func(want string) {
		t.Helper()
		r.must(http.StatusOK, http.MethodPost, "/function/reads", "x")
		pids := r.pids("noop", false)
		if len(pids) == 0 {
			t.Fatal("no replica")
		}
		modes := map[bool]string{true: "-rwxr-x--- | -r--r----- token=", false: "-rwx------ | -r-------- token="}[os.Getuid() == 0]
		if got := secrets(t, pids[0]); got != modes+want {
			t.Errorf("the function sees %q, want token=%s", got, want)
		}
	}
	sees(hidden)
	r.must(http.StatusAccepted, http.MethodPut, "/system/secrets", `{"name":"token","value":"`+hidden+`-2"}`)
	sees(hidden + "-2")
	r.must(http.StatusConflict, http.MethodDelete, "/system/secrets", `{"name":"token"}`)
	r.kill()
	r.restart()
	sees(hidden + "-2")
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"reads"}`)
	r.must(http.StatusAccepted, http.MethodDelete, "/system/secrets", `{"name":"token"}`)
	if strings.Contains(r.log.String(), "hunter2") {
		t.Error("the log holds the secret")
	}
	if err := filepath.WalkDir(r.state, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // NATS's files come and go
		}
		b, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(b), "hunter2") {
			t.Errorf("%s holds the secret", path)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// message is a line of GET /system/logs.
type message struct {
	Name, Namespace, Instance, Text string
	Timestamp                       time.Time
}

// TestLogsOutliveTheirReplica checks that a replica's lines can be read after its end. A client
// that follows the lines also gets those of the next replica.
func TestLogsOutliveTheirReplica(t *testing.T) {
	t.Parallel()
	r := start(t)
	printing := fn{name: "prints", image: "noop"}
	d := printing.deployment()
	d.EnvProcess = "env" // prints its environment and ends: no stage, but a process that prints
	if err := r.Deploy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithTimeout(t.Context(), late)
	defer leave()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.Base+"/system/logs?name=prints&follow=1&tail=-1", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatalf("status %d, %v", resp.StatusCode, resp.Header)
	}
	instances := map[string]bool{}
	// The second attempt comes one second after the first.
	for lines := bufio.NewScanner(resp.Body); len(instances) < 2 && lines.Scan(); {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			t.Fatalf("%v: %s", err, lines.Bytes())
		}
		if m.Text == "STAGECOACH_REPLICA="+m.Instance && m.Name == "prints" && m.Namespace == "openfaas-fn" && time.Since(m.Timestamp) < late {
			instances[m.Instance] = true
		}
	}
	if len(instances) < 2 {
		t.Fatalf("lines of replicas %v, want two who have said their names", instances)
	}
	leave()
	for name := range instances {
		a := r.must(http.StatusOK, http.MethodGet, "/system/logs?name=prints&instance="+name, "")
		if !strings.Contains(string(a.Body), "STAGECOACH_REPLICA="+name) {
			t.Errorf("%s has gone, and its lines are %s", name, a.Body)
		}
	}
	if strings.Contains(r.log.String(), "msg=output") {
		t.Error("the log has functions' output at its ordinary level")
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"prints"}`)
	r.must(http.StatusNotFound, http.MethodGet, "/system/logs?name=prints", "")
}

// TestShutdownEndsFollowers checks that clients that follow logs do not delay the shutdown of up.
func TestShutdownEndsFollowers(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(fn{name: "quiet", image: "noop", labels: zero})
	resp, err := r.HTTP.Get(r.Base + "/system/logs?name=quiet&follow=1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r.stop() // fails if up cuts requests off, which it does at the drain timeout
}

// TestDescribeShowsUsageAndNodes checks that describe shows the usage of the replicas, their nodes
// and how they started.
func TestDescribeShowsUsageAndNodes(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("used", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	u, err := url.Parse(r.Base)
	if err != nil {
		t.Fatal(err)
	}
	c := sdk.NewClient(u, nil, http.DefaultClient)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	replica := regexp.MustCompile(`^used-[a-z0-9]+ on ` + regexp.QuoteMeta(host) + `: ready, (cold|fork|forkheap), ready after [0-9.]+[mµ]?s \((order|load|fork|place) [^()]+\)$`)
	var shown string
	r.until(late, "two replicas in the description", func() bool {
		s, err := c.GetFunction(t.Context(), "used", "")
		if err != nil {
			t.Fatal(err)
		}
		if s.Annotations == nil {
			return false
		}
		shown = (*s.Annotations)["stagecoach.dev/replicas"]
		all := strings.Split(shown, "; ")
		return s.AvailableReplicas == 2 && len(all) == 2 && replica.MatchString(all[0]) && replica.MatchString(all[1])
	})
	l := r.load(4, "/function/used", func(string, client.Answer) error { return nil })
	defer l.end()
	r.until(late, "the work to show", func() bool {
		a := r.must(http.StatusOK, http.MethodGet, "/system/function/used?usage=1", "")
		var s types.FunctionStatus
		if err := json.Unmarshal(a.Body, &s); err != nil {
			t.Fatal(err)
		}
		if s.Usage == nil { // its replicas are in no inventory yet
			return false
		}
		if s.Usage.TotalMemoryBytes < 1<<10 || s.Usage.TotalMemoryBytes > 4<<30 {
			t.Fatalf("usage %+v, want a few megabytes", s.Usage)
		}
		return s.Usage.CPU > 1 && s.Usage.TotalMemoryBytes > 1<<20
	})
}

// TestSystemWantsCredentials calls every route below /system that the code has, and some that it
// does not have.
func TestSystemWantsCredentials(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"basic-auth-user": "admin", "basic-auth-password": "secret"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := start(t, "--basic-auth-dir", dir)
	routes := append(systemRoutes(t), "GET /system", "GET /system/nosuch", "POST /system/functions/", "GET /system/../system/functions")
	if len(routes) < 20 {
		t.Fatalf("found %q, want all of them", routes)
	}
	for _, route := range routes {
		method, path, ok := strings.Cut(route, " ")
		if !ok {
			method, path = http.MethodGet, route
		}
		path = regexp.MustCompile(`\{[^}]*\}`).ReplaceAllString(strings.ReplaceAll(path, "{$}", ""), "x")
		a := r.send(method, path, "{}")
		if denied := a.Status == http.StatusUnauthorized; !denied && (strings.HasPrefix(path, "/system/") && !strings.Contains(path, "..") || a.Status < 300) {
			t.Errorf("%s: status %d without credentials, want 401: %.200s", route, a.Status, a.Body)
		}
	}
	if a := r.send(http.MethodGet, "/system/functions", "", "Authorization", "Basic YWRtaW46c2VjcmV0"); a.Status != http.StatusOK {
		t.Errorf("with the right password: %d %s", a.Status, a.Body)
	}
	if a := r.send(http.MethodGet, "/healthz", ""); a.Status != http.StatusOK {
		t.Errorf("health: %d", a.Status)
	}
}

// systemRoutes finds the patterns of routes below /system in the sources of the API and of up.
func systemRoutes(t *testing.T) []string {
	t.Helper()
	pattern := regexp.MustCompile(`^([A-Z]+ )?/system/[^?%]*$`)
	var out []string
	for _, dir := range []string{".", "../../provider", "../../provider/admin"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					if s, err := strconv.Unquote(lit.Value); err == nil && pattern.MatchString(s) {
						out = append(out, s)
					}
				}
				return true
			})
		}
	}
	return out
}

// TestOpenFaaSClientWithTwoNamespaces manages functions of two namespaces on a real up, with
// OpenFaaS's client.
func TestOpenFaaSClientWithTwoNamespaces(t *testing.T) {
	t.Parallel()
	r := start(t)
	u, err := url.Parse(r.Base)
	if err != nil {
		t.Fatal(err)
	}
	c, ctx := sdk.NewClient(u, nil, http.DefaultClient), t.Context()
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	_, err = c.CreateNamespace(ctx, types.FunctionNamespace{Name: "team-a", Labels: map[string]string{"owner": "a"}})
	check("create namespace", err)
	labels := map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.zero": "true", "com.openfaas.scale.max": "3"}
	for _, ns := range []string{"openfaas-fn", "team-a"} {
		d := types.FunctionDeployment{Service: "echo", Image: "stagecoach/noop:0.1.0", Namespace: ns, Labels: &labels}
		if code, _ := c.Update(ctx, d); code != http.StatusNotFound {
			t.Errorf("update of nothing: %d, want 404", code)
		}
		_, err := c.Deploy(ctx, d)
		check("deploy", err)
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			req, err := http.NewRequestWithContext(ctx, method, "", strings.NewReader("of "+ns))
			check("request", err)
			req.Header.Set("Hmac", "sha256=abc")
			req.ContentLength = -1 // chunked, as OpenFaaS's gateway forwards it
			resp, err := c.InvokeFunction("echo", ns, false, false, req)
			check("invoke", err)
			b := make([]byte, 100)
			n, _ := resp.Body.Read(b)
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK || string(b[:n]) != "of "+ns {
				t.Errorf("%s: %d %q", method, resp.StatusCode, b[:n])
			}
		}
		check("scale", c.ScaleFunction(ctx, "echo", ns, 2))
		r.until(soon, "two replicas", func() bool {
			s, err := c.GetFunction(ctx, "echo", ns)
			return err == nil && s.AvailableReplicas == 2
		})
		list, err := c.GetFunctions(ctx, ns)
		if err != nil || len(list) != 1 || list[0].InvocationCount != 4 || list[0].Namespace != ns {
			t.Errorf("list of %s: %+v, %v", ns, list, err)
		}
	}
	_, err = c.Deploy(ctx, types.FunctionDeployment{ // prints what it is told of the request
		Service: "shows", Image: "stagecoach/noop:0.1.0", EnvProcess: "env", EnvVars: map[string]string{"mode": "streaming"}, Labels: &labels,
	})
	check("deploy", err)
	a := r.must(http.StatusOK, http.MethodPut, "/function/shows.openfaas-fn/a/b?q=1", "body", "Hmac", "sha256=abc", "X-Custom", "yes")
	for _, want := range []string{"Http_Method=PUT", "Http_Path=/a/b", "Http_Query=q=1", "Http_Hmac=sha256=abc", "Http_X_Custom=yes"} {
		if !strings.Contains(string(a.Body), want+"\n") {
			t.Errorf("the function is told\n%s\nwant %s", a.Body, want)
		}
	}
	if err := c.DeleteNamespace(ctx, "team-a"); err == nil {
		t.Error("a namespace with a function is deleted")
	}
	check("delete", c.DeleteFunction(ctx, "echo", "team-a"))
	check("delete namespace", c.DeleteNamespace(ctx, "team-a"))
	names, err := c.GetNamespaces(ctx)
	if err != nil || strings.Join(names, " ") != "openfaas-fn" {
		t.Errorf("namespaces %v, %v", names, err)
	}
	info, err := c.GetInfo(ctx)
	if err != nil || info.Provider.Provider != "stagecoach" {
		t.Errorf("info %+v, %v", info, err)
	}
}
