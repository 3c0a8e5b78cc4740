package provider

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
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

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/logbook"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
)

// remote is the API over HTTP, with OpenFaaS's own client.
type remote struct {
	*api
	*sdk.Client
	url  string
	user *url.Userinfo
}

func newRemote(t *testing.T) *remote {
	t.Helper()
	a := newAPI(t, newMemoryStore(), &Credentials{"admin", "secret"})
	srv := httptest.NewServer(a)
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	return &remote{a, sdk.NewClient(u, &sdk.BasicAuth{Username: "admin", Password: "secret"}, srv.Client()), srv.URL, url.UserPassword("admin", "secret")}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestSDKFunctions deploys, scales and removes functions in two namespaces with OpenFaaS's client.
func TestSDKFunctions(t *testing.T) {
	r, ctx := newRemote(t), t.Context()
	for _, ns := range []string{"", "team-a"} {
		d := types.FunctionDeployment{
			Service: "echo", Image: "stagecoach/echo:1", Namespace: ns, EnvProcess: "cat", EnvVars: map[string]string{"K": "v"},
			Constraints: []string{"node.platform.os == linux"}, Labels: &map[string]string{"l": "1"}, Annotations: &map[string]string{"a": "2"},
			Limits: &types.FunctionResources{Memory: "128Mi", CPU: "100m"}, Requests: &types.FunctionResources{Memory: "64M", CPU: "0.05"}, ReadOnlyRootFilesystem: true,
		}
		if code, err := r.Update(ctx, d); code != http.StatusNotFound || err == nil {
			t.Errorf("update of nothing: %d, %v, want 404, on which faas-cli creates", code, err)
		}
		code, err := r.Deploy(ctx, d)
		if err != nil || code != http.StatusAccepted {
			t.Fatalf("deploy: %d, %v", code, err)
		}
		d.Image = "stagecoach/echo:2"
		_, err = r.Update(ctx, d)
		ok(t, err)
		got, err := r.GetFunction(ctx, "echo", ns)
		ok(t, err)
		if got.Image != d.Image || got.EnvProcess != "cat" || got.Constraints[0] != d.Constraints[0] || *got.Limits != *d.Limits || *got.Requests != *d.Requests ||
			!got.ReadOnlyRootFilesystem || (*got.Labels)["l"] != "1" {
			t.Errorf("described: %+v", got)
		}
		list, err := r.GetFunctions(ctx, ns)
		if err != nil || len(list) != 1 {
			t.Errorf("list: %+v, %v", list, err)
		}
		ok(t, r.ScaleFunction(ctx, "echo", ns, 3))
		if got := r.fakes.scaled["echo."+namespaceOr(ns)]; got != 3 {
			t.Errorf("scaled to %d, want 3", got)
		}
	}
	names, err := r.GetNamespaces(ctx)
	if err != nil || strings.Join(names, " ") != "openfaas-fn team-a" {
		t.Errorf("namespaces %v, %v", names, err)
	}
	for _, ns := range []string{"", "team-a"} {
		ok(t, r.DeleteFunction(ctx, "echo", ns))
		if err := r.DeleteFunction(ctx, "echo", ns); err == nil || !strings.Contains(err.Error(), "not found") {
			t.Errorf("second deletion: %v", err)
		}
	}
	if err := r.ScaleFunction(ctx, "echo", "", 1); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("scale of nothing: %v", err)
	}
	info, err := r.GetInfo(ctx)
	if err != nil || info.Provider.Provider != "stagecoach" {
		t.Errorf("info %+v, %v", info, err)
	}
}

func namespaceOr(ns string) string {
	if ns == "" {
		return pipeline.DefaultNamespace
	}
	return ns
}

// seen returns what a function that names these secrets sees of them. Without names, it returns all
// secrets that the function has named.
func (a *api) seen(ns, function string, names ...string) string {
	a.t.Helper()
	files, _ := filepath.Glob(filepath.Join(a.state, "secret-mounts", ns, function, "*", "*"))
	if len(names) > 0 {
		files, _ = filepath.Glob(filepath.Join(a.Mounts.(*secret.Store).MountPath(ns, function, names), "*"))
	}
	var out []string
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			a.t.Fatal(err)
		}
		out = append(out, filepath.Base(file)+"="+string(b))
	}
	return strings.Join(out, " ")
}

// TestSDKSecrets checks that secrets are created, listed by name only, changed, seen by the
// functions that name them, and kept while a function names them.
func TestSDKSecrets(t *testing.T) {
	r, ctx := newRemote(t), t.Context()
	code, err := r.CreateSecret(ctx, types.Secret{Name: "token", Value: "one"})
	if err != nil || code != http.StatusCreated {
		t.Fatalf("create: %d, %v", code, err)
	}
	if code, _ := r.CreateSecret(ctx, types.Secret{Name: "token", Value: "two"}); code != http.StatusConflict {
		t.Errorf("second creation: %d, want 409", code)
	}
	if code, _ := r.UpdateSecret(ctx, types.Secret{Name: "nosuch", Value: "two"}); code != http.StatusNotFound {
		t.Errorf("update of nothing: %d, want 404", code)
	}
	raw := []byte{0, 0xff, '\n'}
	// As faas-cli sends a file.
	_, err = r.CreateSecret(ctx, types.Secret{Name: "key.pem", Value: string(raw), RawValue: raw})
	ok(t, err)
	_, err = r.CreateSecret(ctx, types.Secret{Name: "token", Namespace: "team-a", Value: "of team-a"})
	ok(t, err)
	for ns, want := range map[string]string{"": "key.pem token", "team-a": "token"} {
		secrets, err := r.GetSecrets(ctx, ns)
		ok(t, err)
		var names []string
		for _, s := range secrets {
			names = append(names, s.Name)
			if s.Value != "" || len(s.RawValue) > 0 || s.Namespace != namespaceOr(ns) {
				t.Errorf("listed %+v", s)
			}
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("secrets of %q: %q, want %q", ns, got, want)
		}
	}
	d := types.FunctionDeployment{Service: "fn", Image: "stagecoach/echo:1", Secrets: []string{"token", "key.pem"}}
	_, err = r.Deploy(ctx, d)
	ok(t, err)
	if got := r.seen(pipeline.DefaultNamespace, "fn"); got != "key.pem="+string(raw)+" token=one" {
		t.Errorf("the function sees %q", got)
	}
	_, err = r.UpdateSecret(ctx, types.Secret{Name: "token", Value: "two"})
	ok(t, err)
	if got := r.seen(pipeline.DefaultNamespace, "fn"); !strings.Contains(got, "token=two") {
		t.Errorf("after the change the function sees %q", got)
	}
	if err := r.DeleteSecret(ctx, "token", ""); err == nil || !strings.Contains(err.Error(), "409") || !strings.Contains(err.Error(), "(fn)") {
		t.Errorf("deletion of a secret in use: %v, want 409 and the function's name", err)
	}
	d.Secrets = []string{"key.pem"}
	_, err = r.Update(ctx, d)
	ok(t, err)
	if got := r.seen(pipeline.DefaultNamespace, "fn", "key.pem"); got != "key.pem="+string(raw) {
		t.Errorf("deployed without it, the function sees %q", got)
	}
	if got := r.seen(pipeline.DefaultNamespace, "fn", "token", "key.pem"); !strings.Contains(got, "token=two") {
		t.Errorf("replicas of the earlier deploy see %q", got)
	}
	ok(t, r.DeleteSecret(ctx, "token", ""))
	if err := r.DeleteSecret(ctx, "token", ""); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("second deletion: %v", err)
	}
	if code, err := r.Deploy(ctx, types.FunctionDeployment{Service: "other", Image: "stagecoach/echo:1", Namespace: "team-a", Secrets: []string{"token", "key.pem"}}); code != http.StatusBadRequest ||
		!strings.Contains(err.Error(), "secrets[1]") || strings.Contains(err.Error(), "secrets[0]") {
		t.Errorf("a secret of another namespace: %d, %v, want 400 and secrets[1]", code, err)
	}
	if got := r.seen("team-a", "other"); got != "" {
		t.Errorf("a refused deploy has left %q", got)
	}
	ok(t, r.DeleteFunction(ctx, "fn", ""))
	if got := r.seen(pipeline.DefaultNamespace, "fn"); got != "" {
		t.Errorf("a removed function has left %q", got)
	}
	r.store.refuse = errors.New("no space left")
	if code, _ := r.Deploy(ctx, types.FunctionDeployment{Service: "half", Image: "stagecoach/echo:1", Secrets: []string{"key.pem"}}); code != http.StatusServiceUnavailable {
		t.Errorf("deploy without a store: %d, want 503", code)
	}
	if got := r.seen(pipeline.DefaultNamespace, "half"); got != "" {
		t.Errorf("a deploy that failed has left %q", got)
	}
}

// TestProcessOfOtherSecrets checks that functions that share a process must name the same secrets,
// or the second deploy is refused.
func TestProcessOfOtherSecrets(t *testing.T) {
	r, ctx := newRemote(t), t.Context()
	for _, ns := range []string{"", "team-a"} {
		for _, name := range []string{"a", "b"} {
			_, err := r.CreateSecret(ctx, types.Secret{Name: name, Namespace: ns, Value: "x"})
			ok(t, err)
		}
	}
	deploy := func(name, ns, process, fprocess string, secrets ...string) error {
		t.Helper()
		d := types.FunctionDeployment{Service: name, Namespace: ns, Image: "stagecoach/echo:1", EnvProcess: fprocess, Secrets: secrets}
		d.Annotations = &map[string]string{"stagecoach.dev/process": process}
		if _, there := r.Registry.Function(pipeline.Key{Name: name, Namespace: namespaceOr(ns)}); there {
			_, err := r.Update(ctx, d)
			return err
		}
		_, err := r.Deploy(ctx, d)
		return err
	}
	ok(t, deploy("first", "", "shared", "", "a", "b"))
	ok(t, deploy("second", "", "shared", "", "b", "a", "b"))
	ok(t, deploy("first", "", "shared", "", "b", "a"))
	ok(t, deploy("alone", "", "other", ""))
	// Functions with different commands do not share a process.
	ok(t, deploy("python", "", "shared", "python ./stage", "a"))
	ok(t, deploy("first", "team-a", "shared", "", "a"))
	// Functions with different networks do not share a process.
	_, err := r.Deploy(ctx, types.FunctionDeployment{
		Service: "cut-off", Image: "stagecoach/echo:1", Secrets: []string{"a"},
		Annotations: &map[string]string{"stagecoach.dev/process": "shared", "stagecoach.dev/network": "none"},
	})
	ok(t, err)
	// Nor do functions with different runtime classes or devices.
	r.RuntimeClasses, r.CDIDevices = []string{"gvisor"}, []string{"vendor.com/device=*"}
	for service, option := range map[string][2]string{"enclosed": {"runtime-class", "gvisor"}, "equipped": {"cdi-devices", "vendor.com/device=null"}} {
		_, err := r.Deploy(ctx, types.FunctionDeployment{
			Service: service, Image: "stagecoach/echo:1", Secrets: []string{"a"},
			Annotations: &map[string]string{"stagecoach.dev/process": "shared", "stagecoach.dev/" + option[0]: option[1]},
		})
		ok(t, err)
	}
	for _, secrets := range [][]string{nil, {"a"}} {
		for _, name := range []string{"third", "second"} {
			err := deploy(name, "", "shared", "", secrets...)
			if err == nil {
				t.Fatalf("%s with the secrets %q is deployed", name, secrets)
			}
			for _, want := range []string{"409", strconv.Quote(name), `"first"`, "stagecoach.dev/process: shared", "names the secrets a, b", "Want the same secrets in both"} {
				// The client quotes the message.
				if !strings.Contains(strings.ReplaceAll(err.Error(), `\"`, `"`), want) {
					t.Errorf("%s with the secrets %q: %v, want it to say %s", name, secrets, err, want)
				}
			}
		}
	}
	if _, there := r.Registry.Function(pipeline.Key{Name: "third", Namespace: pipeline.DefaultNamespace}); there || r.seen(pipeline.DefaultNamespace, "third") != "" {
		t.Error("a refused deploy has left something")
	}
	ok(t, deploy("second", "", "apart", ""))
	ok(t, deploy("first", "", "shared", "", "a"))
}

// TestSecretsStayHidden checks that no answer, log line or stored record contains a value, whatever
// is wrong with a request.
func TestSecretsStayHidden(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	var log strings.Builder
	a.Log = newLog(&log)
	const hidden, encoded = "hunter2hunter2", "aHVudGVyMmh1bnRlcjI=" // in base64
	var answers strings.Builder
	ask := func(method, path, body string) {
		_, text := a.do(method, path, body, "Accept", "application/json")
		answers.WriteString(text)
		_, text = a.do(method, path, body)
		answers.WriteString(text)
	}
	for _, body := range []string{
		`{"name":"s","value":"` + hidden + `"}`, `{"name":"s","rawValue":"` + encoded + `"}`, `{"name":"S","value":"` + hidden + `"}`,
		`{"name":"s","value":"` + hidden + `"`, `{"name":"s","value":"` + hidden + `","rawValue":"%"}`, `{"name":7,"value":"` + hidden + `"}`,
		`{"value":"` + hidden + `"}`, `{"name":"s","namespace":"A","value":"` + hidden + `"}`, `{"name":"s","value":["` + hidden + `"]}`,
		`"` + hidden + `"`, hidden,
	} {
		for _, method := range []string{post, put, del} {
			ask(method, "/system/secrets", body)
		}
	}
	ask(post, "/system/secrets", `{"name":"s","value":"`+hidden+`"}`)
	ask(post, functions, `{"service":"f","image":"stagecoach/f:1","secrets":["s"]}`)
	for _, path := range []string{"/system/secrets", functions, "/system/function/f?usage=1"} {
		ask(get, path, "")
	}
	if err := os.RemoveAll(filepath.Join(a.state, "secrets")); err != nil {
		t.Fatal(err)
	}
	// Makes storing fail.
	if err := os.WriteFile(filepath.Join(a.state, "secrets"), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	ask(post, "/system/secrets", `{"name":"t","value":"`+hidden+`"}`)
	if !strings.Contains(log.String(), "status=503") {
		t.Errorf("storing went well: it proves nothing:\n%s", log.String())
	}
	stored := ""
	for _, e := range a.store.entries {
		stored += string(e.Value)
	}
	for where, text := range map[string]string{"answers": answers.String(), "log": log.String(), "store": stored} {
		if strings.Contains(text, "hunter") || strings.Contains(text, encoded[:8]) || text == "" {
			t.Errorf("%s:\n%s", where, text)
		}
	}
}

func TestSDKNamespaces(t *testing.T) {
	r, ctx := newRemote(t), t.Context()
	n := types.FunctionNamespace{Name: "team-b", Labels: map[string]string{"owner": "b"}, Annotations: map[string]string{"note": "x"}}
	code, err := r.CreateNamespace(ctx, n)
	if err != nil || code != http.StatusCreated {
		t.Fatalf("create: %d, %v", code, err)
	}
	if code, _ := r.CreateNamespace(ctx, n); code != http.StatusConflict {
		t.Errorf("second creation: %d, want 409", code)
	}
	n.Labels["owner"] = "c"
	_, err = r.UpdateNamespace(ctx, n)
	ok(t, err)
	got, err := r.GetNamespace(ctx, "team-b")
	if err != nil || got.Labels["owner"] != "c" || got.Annotations["note"] != "x" || got.Name != "team-b" {
		t.Errorf("namespace %+v, %v", got, err)
	}
	if code, _ := r.UpdateNamespace(ctx, types.FunctionNamespace{Name: "nosuch"}); code != http.StatusNotFound {
		t.Errorf("update of nothing: %d, want 404", code)
	}
	_, err = r.Deploy(ctx, types.FunctionDeployment{Service: "f", Image: "stagecoach/f:1", Namespace: "team-b"})
	ok(t, err)
	_, err = r.CreateSecret(ctx, types.Secret{Name: "s", Namespace: "team-b", Value: "v"})
	ok(t, err)
	if err := r.DeleteNamespace(ctx, "team-b"); err == nil || !strings.Contains(err.Error(), "409") || !strings.Contains(err.Error(), "functions (f) and secrets (s)") {
		t.Errorf("deletion with a function and a secret: %v", err)
	}
	ok(t, r.DeleteFunction(ctx, "f", "team-b"))
	ok(t, r.DeleteSecret(ctx, "s", "team-b"))
	ok(t, r.DeleteNamespace(ctx, "team-b"))
	if err := r.DeleteNamespace(ctx, "team-b"); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("second deletion: %v", err)
	}
	if err := r.DeleteNamespace(ctx, pipeline.DefaultNamespace); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("deletion of the default namespace: %v", err)
	}
	// Creates the namespace.
	_, err = r.CreateSecret(ctx, types.Secret{Name: "s", Namespace: "team-c", Value: "v"})
	ok(t, err)
	names, err := r.GetNamespaces(ctx)
	if err != nil || strings.Join(names, " ") != "openfaas-fn team-c" {
		t.Errorf("namespaces %v, %v", names, err)
	}
	reg, err := OpenRegistry(ctx, r.store, r.Log) // as after a restart
	ok(t, err)
	defer reg.Close()
	if _, there := reg.Namespaces()["team-c"]; !there || len(reg.Namespaces()) != 1 {
		t.Errorf("after a restart %v", reg.Namespaces())
	}
	for body, want := range map[string]string{
		`{"name":"Team"}`: "name: ", `{"name":"a.b"}`: "name: ", `{"name":"../x"}`: "name: ", `{}`: "name: ", `{"name":7}`: "name: ", `{"name":"x","labels":7}`: "labels: ",
		`{"name":"ä"}`: "name: ", `{"name":"` + strings.Repeat("a", 64) + `"}`: "name: ", ``: "body: ",
	} {
		if code, text := r.do(post, "/system/namespace/", body, "Authorization", r.auth()); code != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%s: %d %q, want 400 and %q", body, code, text, want)
		}
	}
	if code, text := r.do(put, "/system/namespace/team-c", `{"name":"other"}`, "Authorization", r.auth()); code != http.StatusBadRequest {
		t.Errorf("another name in the body: %d %s", code, text)
	}
}

func (r *remote) auth() string {
	req := &http.Request{Header: http.Header{}}
	password, _ := r.user.Password()
	req.SetBasicAuth(r.user.Username(), password)
	return req.Header.Get("Authorization")
}

// TestSDKLogs checks logs by function, replica, time and number, then new lines, until the client
// leaves.
func TestSDKLogs(t *testing.T) {
	r, ctx := newRemote(t), t.Context()
	for _, ns := range []string{"", "team-a"} {
		_, err := r.Deploy(ctx, types.FunctionDeployment{Service: "fn", Image: "stagecoach/f:1", Namespace: ns})
		ok(t, err)
	}
	noon := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	say := func(ns string, i int, text string) {
		r.book.Add(pipeline.ParseKey("fn."+ns), logbook.Line{At: noon.Add(time.Duration(i) * time.Minute), Replica: fmt.Sprintf("fn-%d", i%2), Text: text})
	}
	for i := range 4 {
		say(pipeline.DefaultNamespace, i, fmt.Sprintf("line %d <&>", i))
	}
	say("team-a", 0, "of team-a")
	since := noon.Add(2 * time.Minute)
	for name, tc := range map[string]struct {
		ns    string
		tail  int
		since *time.Time
		want  string
	}{
		"all, as faas-cli asks": {"", -1, nil, "line 0 <&>|line 1 <&>|line 2 <&>|line 3 <&>"},
		"tail":                  {"", 1, nil, "line 3 <&>"},
		"since":                 {"", -1, &since, "line 2 <&>|line 3 <&>"},
		"of a namespace":        {"team-a", -1, nil, "of team-a"},
	} {
		messages, err := r.GetLogs(ctx, "fn", tc.ns, false, tc.tail, tc.since)
		ok(t, err)
		var got []string
		for m := range messages {
			got = append(got, m.Text)
			if m.Name != "fn" || m.Namespace != namespaceOr(tc.ns) || !strings.HasPrefix(m.Instance, "fn-") || m.Timestamp.Before(noon) {
				t.Errorf("%s: %+v", name, m)
			}
		}
		if text := strings.Join(got, "|"); text != tc.want {
			t.Errorf("%s: %q, want %q", name, text, tc.want)
		}
	}
	ctx, leave := context.WithCancel(ctx)
	messages, err := r.GetLogs(ctx, "fn", "", true, 1, nil)
	ok(t, err)
	if m := <-messages; m.Text != "line 3 <&>" {
		t.Errorf("first %+v", m)
	}
	say(pipeline.DefaultNamespace, 9, "new")
	if m := <-messages; m.Text != "new" || m.Instance != "fn-1" {
		t.Errorf("then %+v", m)
	}
	leave()
	for range messages { // waits for the end
	}
	messages, err = r.GetLogs(t.Context(), "fn", "", true, 1, nil)
	ok(t, err)
	<-messages
	r.book.Close() // as when the process ends
	for range messages {
	}
	if _, err := r.GetLogs(t.Context(), "nosuch", "", false, 1, nil); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("logs of nothing: %v", err)
	}
	for query, want := range map[string]string{
		"": "name: ", "?name=fn&tail=many": "tail: ", "?name=fn&since=yesterday": "since: ", "?name=fn&follow=perhaps": "follow: ",
	} {
		if code, text := r.do(get, "/system/logs"+query, "", "Authorization", r.auth()); code != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("logs%s: %d %q, want 400 and %q", query, code, text, want)
		}
	}
	if _, text := r.do(get, "/system/logs?name=fn&instance=fn-0&tail=1", "", "Authorization", r.auth()); !strings.Contains(text, "line 2") || strings.Count(text, "\n") != 1 {
		t.Errorf("of a replica: %q", text)
	}
}

// TestSlowReaderIsToldOfLostLines checks that a line reports how many lines a slow reader has
// missed.
func TestSlowReaderIsToldOfLostLines(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"fn","image":"stagecoach/f:1"}`)
	a.Logs = lossy{}
	if text := a.must(http.StatusOK, get, "/system/logs?name=fn&follow=1", ""); !strings.Contains(text, "7 lines are lost") || strings.Count(text, "\n") != 2 {
		t.Errorf("%s", text)
	}
}

type lossy struct{}

func (lossy) Read(LogQuery) LogReader { return &lossyReader{} }

type lossyReader struct{ read bool }

func (r *lossyReader) Read(context.Context) ([]LogLine, uint64, error) {
	if r.read {
		return nil, 0, io.EOF
	}
	r.read = true
	return []LogLine{{Text: "after them"}}, 7, nil
}
func (*lossyReader) Close() {}

// TestBehindAGateway checks requests as OpenFaaS's own gateway forwards them: without the body's
// length, with more headers, and with polling.
func TestBehindAGateway(t *testing.T) {
	r := newRemote(t)
	send := func(method, path, body string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, r.url+path, io.MultiReader(strings.NewReader(body)))
		ok(t, err)
		req.ContentLength = -1 // chunked
		req.Header.Set("Authorization", r.auth())
		req.Header.Set("X-Forwarded-For", "10.0.0.1:5000")
		req.Header.Set("X-Forwarded-Host", "gateway.example:8080")
		resp, err := http.DefaultClient.Do(req)
		ok(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		ok(t, err)
		return resp.StatusCode, string(b)
	}
	for _, tc := range []struct {
		method, path, body string
		want               int
	}{
		{post, functions, `{"service":"f","image":"stagecoach/f:1"}`, 202},
		{put, functions, `{"service":"f","image":"stagecoach/f:2"}`, 202},
		{get, functions, ``, 200},
		{get, "/system/function/f?namespace=openfaas-fn&usage=0", ``, 200},
		{post, "/system/scale-function/f?namespace=openfaas-fn", `{"serviceName":"f","replicas":5,"namespace":"openfaas-fn"}`, 202},
		{post, "/system/secrets", `{"name":"s","value":"v"}`, 201},
		{del, "/system/secrets", `{"name":"s"}`, 202},
		{post, "/system/namespace/", `{"name":"n"}`, 201},
		{del, "/system/namespace/n", `{"name":"n"}`, 202},
		{get, "/system/logs?name=f&follow=0&tail=-1", ``, 200},
		{del, functions, `{"functionName":"f"}`, 202},
		{get, "/healthz", ``, 200},
		{post, functions, `{"service":"` + strings.Repeat("x", 2<<20) + `"}`, 413},
	} {
		if code, text := send(tc.method, tc.path, tc.body); code != tc.want {
			t.Errorf("%s %s: %d %s, want %d", tc.method, tc.path, code, text, tc.want)
		}
	}
}

// TestRecordedRequestsOfFaasCLI plays testdata/faas-cli.txt: requests as faas-cli sends them, in
// order, and the answers that faas-cli needs.
func TestRecordedRequestsOfFaasCLI(t *testing.T) {
	r := newRemote(t)
	b, err := os.ReadFile("testdata/faas-cli.txt")
	ok(t, err)
	steps := strings.Split(string(b), "\n== ")[1:]
	if len(steps) < 20 {
		t.Fatalf("%d steps", len(steps))
	}
	for _, step := range steps {
		title, rest, _ := strings.Cut(step, "\n")
		request, want, found := strings.Cut(rest, "\n--\n")
		head, body, _ := strings.Cut(request, "\n\n")
		body = strings.TrimSuffix(body, "\n")
		if !found {
			t.Fatalf("%s: no --", title)
		}
		raw := strings.ReplaceAll(head, "\n", "\r\n") + "\r\n"
		if body != "" {
			raw += fmt.Sprintf("Content-Length: %d\r\n", len(body))
		}
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw + "\r\n" + body)))
		if err != nil {
			t.Fatalf("%s: %v", title, err)
		}
		w := httptest.NewRecorder()
		r.ServeHTTP(w, req.WithContext(t.Context()))
		status, pattern, _ := strings.Cut(strings.TrimSuffix(want, "\n"), "\n")
		if fmt.Sprint(w.Code) != status {
			t.Errorf("%s: status %d, want %s: %s", title, w.Code, status, w.Body)
		}
		if m, err := regexp.MatchString("(?s)^"+pattern+"\n?$", w.Body.String()); err != nil || pattern != "" && !m {
			t.Errorf("%s: %v\n%s\nwant\n%s", title, err, w.Body, pattern)
		}
	}
}

// TestBadInputChangesNothing checks that bad requests get a clear 4xx and change nothing.
func TestBadInputChangesNothing(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	long := strings.Repeat("a", 300)
	for _, tc := range []struct{ method, path, body string }{
		{post, functions, `{"service":"../../etc","image":"stagecoach/f:1"}`},
		{post, functions, `{"service":"é","image":"stagecoach/f:1"}`},
		{post, functions, `{"service":"` + long + `","image":"stagecoach/f:1"}`},
		{post, functions, `{"service":"a\u0000","image":"stagecoach/f:1"}`},
		{post, functions, `{"service":"a","image":"../../../bin/sh"}`},
		{post, functions, `{"service":"a","image":"stagecoach/f:1","namespace":"../x"}`},
		{post, functions, `{"service":"a","image":"stagecoach/f:1","labels":["x"]}`},
		{post, functions, `{"service":"a","image":"stagecoach/f:1","secrets":"x"}`},
		{post, functions, `[]`},
		{post, functions, `null`},
		{post, functions, strings.Repeat("[", 20_000)},
		{post, functions, "\xff\xfe"},
		{post, "/system/secrets", `{"name":"../x","value":"v"}`},
		{post, "/system/secrets", `{"name":"x","namespace":"../y","value":"v"}`},
		{post, "/system/secrets", `{"name":"x"}`},
		{post, "/system/secrets", `{"name":"Ä","value":"v"}`},
		{post, "/system/secrets", `{"name":"` + long + `","value":"v"}`},
		{post, "/system/secrets", `{"name":"x","value":"` + strings.Repeat("a", maxSecret+1) + `"}`},
		{post, "/system/secrets", `{"name":"x","value":"` + strings.Repeat("a", maxSecretBody) + `"}`},
		{post, "/system/secrets?namespace=a%2Fb", `{"name":"x","value":"v"}`},
		{get, "/system/secrets?namespace=..%2F..", ``},
		{put, "/system/namespace/..%2f..", `{}`},
		{del, "/system/namespace/a%00b", ``},
		{get, "/system/function/..%2f..%2fetc%2fpasswd", ``},
		{get, "/system/logs?name=..%2f..%2fetc%2fpasswd", ``},
		{post, "/system/scale-function/..%2fx", `{"replicas":1}`},
		{del, functions, `{"functionName":"../x"}`},
		{del, functions, `{}`},
	} {
		code, text := a.do(tc.method, tc.path, tc.body)
		if code < 400 || code >= 500 || strings.TrimSpace(text) == "" || len(text) > 1000 {
			t.Errorf("%s %s %.60s: %d %.300q, want a 4xx that says why", tc.method, tc.path, tc.body, code, text)
		}
	}
	if len(a.store.entries) != 0 {
		t.Errorf("stored: %v", a.store.entries)
	}
	ok(t, filepath.WalkDir(a.state, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			t.Errorf("left: %s", path)
		}
		return err
	}))
	// As OpenFaaS accepts it.
	a.must(http.StatusAccepted, post, functions, `{"service":"a","image":"stagecoach/f:1","unknown":{"field":[1]},"labels":null,"secrets":null}`)
	largest, err := json.Marshal(types.Secret{Name: "large", Value: strings.Repeat("\x01", maxSecret)})
	ok(t, err)
	// six bytes of JSON per byte.
	a.must(http.StatusCreated, post, "/system/secrets", string(largest))
}

// FuzzSystem checks that no request causes a 5xx, and that everything stored can be read again.
func FuzzSystem(f *testing.F) {
	for _, s := range [][3]string{
		{"POST", "functions", `{"service":"f","image":"stagecoach/f:1","namespace":"n","envProcess":"cat","envVars":{"a":"b"},"constraints":["c"],"secrets":["s"],` +
			`"labels":{"com.openfaas.scale.min":"1"},"annotations":{"stagecoach.dev/pipeline":"p"},"limits":{"memory":"16Mi","cpu":"1m"},"requests":{"memory":"16Mi"},"readOnlyRootFilesystem":true}`},
		{"PUT", "functions", `{"service":"f","image":"stagecoach/f:2"}`},
		{"DELETE", "functions?namespace=n", `{"functionName":"f"}`},
		{"POST", "secrets", `{"name":"s","value":"v","rawValue":"dg==","namespace":"n"}`},
		{"PUT", "secrets", `{"name":"s","value":"w"}`},
		{"DELETE", "secrets", `{"name":"s"}`},
		{"POST", "namespace/", `{"name":"n","labels":{"a":"b"},"annotations":{"c":"d"}}`},
		{"DELETE", "namespace/n", ``},
		{"POST", "scale-function/f", `{"serviceName":"f","replicas":3}`},
		{"GET", "logs?name=f&tail=-1&since=2026-01-02T15:04:05Z&instance=f-1", ``},
		{"GET", "function/f?usage=1", ``},
		{"GET", "pipelines/p?namespace=n", ``},
	} {
		f.Add(s[0], s[1], s[2])
	}
	f.Fuzz(func(t *testing.T, method, path, body string) {
		if strings.Contains(path, "follow") {
			t.Skip("waits")
		}
		u, err := url.ParseRequestURI("/system/" + path)
		if err != nil || !regexp.MustCompile(`^[A-Z]+$`).MatchString(method) {
			t.Skip("never leaves a client")
		}
		a := newAPI(t, newMemoryStore(), nil)
		a.must(http.StatusCreated, post, "/system/secrets", `{"name":"s","value":"v"}`)
		a.must(http.StatusAccepted, post, functions, `{"service":"f","image":"stagecoach/f:1","secrets":["s"]}`)
		r := httptest.NewRequestWithContext(t.Context(), method, "/system/", strings.NewReader(body))
		r.URL = u
		w := httptest.NewRecorder()
		a.ServeHTTP(w, r)
		if w.Code >= 500 {
			t.Fatalf("%s %s: %d %s", method, path, w.Code, w.Body)
		}
		a.must(http.StatusOK, get, functions, "")
		a.must(http.StatusOK, get, "/system/namespaces", "")
		before := len(a.Registry.Functions())
		reg, err := OpenRegistry(t.Context(), a.store, a.Log)
		if err != nil {
			t.Fatal(err)
		}
		defer reg.Close()
		if len(reg.Functions()) != before || len(reg.Namespaces()) != len(a.Registry.Namespaces()) {
			t.Fatalf("%s %s: after a restart %d functions, want %d", method, path, len(reg.Functions()), before)
		}
	})
}
