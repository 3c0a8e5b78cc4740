package provider

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func decodeJSON[T any](t *testing.T, text string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return v
}

// TestFunctionLifecycle follows a function through faas-cli's requests: an update that finds no
// function, a create, an update and a delete.
func TestFunctionLifecycle(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	const echo = `{"service":"echo","image":"stagecoach/echo:1","envProcess":"cat","envVars":{"K":"v"},"labels":{"l":"1"},"annotations":{"a":"2"}}`
	a.must(http.StatusNotFound, put, functions, echo)
	a.must(http.StatusAccepted, post, functions, echo)
	if text := a.must(http.StatusConflict, post, functions, echo); !strings.Contains(text, "echo.openfaas-fn") {
		t.Errorf("second create: %q does not name the function", text)
	}
	first := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo", ""))
	if first.Name != "echo" || first.Namespace != pipeline.DefaultNamespace || first.EnvVars["K"] != "v" || (*first.Labels)["l"] != "1" ||
		(*first.Annotations)["a"] != "2" || first.EnvProcess != "cat" || first.CreatedAt.IsZero() {
		t.Errorf("described: %+v", first)
	}
	rev := a.Registry.Functions()[0].Revision
	a.must(http.StatusAccepted, put, functions, strings.Replace(echo, "echo:1", "echo:2", 1))
	second := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo", ""))
	if second.Image != "stagecoach/echo:2" || !second.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("updated: image %q created %v, want stagecoach/echo:2 created %v", second.Image, second.CreatedAt, first.CreatedAt)
	}
	if now := a.Registry.Functions()[0].Revision; now <= rev {
		t.Errorf("revision %d after %d, want it to grow", now, rev)
	}
	a.must(http.StatusAccepted, del, functions, `{"functionName":"echo"}`)
	a.must(http.StatusNotFound, get, "/system/function/echo", "")
	a.must(http.StatusNotFound, del, functions, `{"functionName":"echo"}`)
	if text := a.must(http.StatusOK, get, functions, ""); text != "[]\n" {
		t.Errorf("list: %q, want []", text)
	}
}

// TestGuessedProcess checks that a deployment without a process gets the one that its image
// probably runs, and that answers name it.
func TestGuessedProcess(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	const guess = "fprocess: ./one, because because; runs "
	for _, tc := range []struct{ field, process, says string }{
		{``, "./one", guess + "once per request (environment mode: http runs it as a server)"},
		{`"envVars":{"mode":"serializing"},`, "./one", guess + "in mode serializing"},
		{`"annotations":{"stagecoach.dev/guessed-process":"old"},`, "./one", guess + "once per request (environment mode: http runs it as a server)"},
		{`"envProcess":"./two",`, "./two", ""},
		{`"envVars":{"fprocess":"./two"},`, "", ""},
		{`"envVars":{"function_process":"./two"},`, "", ""},
	} {
		a.do(del, functions, `{"functionName":"a"}`) // from the previous case
		text := a.must(http.StatusAccepted, post, functions, `{"service":"a",`+tc.field+`"image":"stagecoach/one:1"}`)
		if want := "\nguessed " + tc.says; strings.Contains(text, want) != (tc.says != "") || tc.says == "" && strings.Contains(text, "guessed") {
			t.Errorf("%s: answered %q, want %q in it", tc.field, text, want)
		}
		shown := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/a", ""))
		if got := deref(shown.Annotations)[GuessAnnotation]; got != tc.says {
			t.Errorf("%s: described as %q, want %q", tc.field, got, tc.says)
		}
		if got := a.Registry.Functions()[0].Process(); got != tc.process {
			t.Errorf("%s: it runs %q, want %q", tc.field, got, tc.process)
		}
	}
	again := newAPI(t, store, nil) // a restart
	if got := again.Registry.Functions(); len(got) != 1 || got[0].Guess.Process != "" {
		t.Fatalf("after a restart: %+v", got)
	}
	again.must(http.StatusAccepted, put, functions, `{"service":"a","image":"stagecoach/one:1"}`)
	if got := newAPI(t, store, nil).Registry.Functions()[0].Process(); got != "./one" {
		t.Errorf("after another restart it runs %q, want ./one", got)
	}
}

func TestBadDeploymentsNameTheField(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	for name, tc := range map[string]struct {
		body  string
		paths []string
	}{
		"no JSON":            {`{"service":`, []string{"body"}},
		"nothing":            {``, []string{"body"}},
		"two values":         {`{"service":"a","image":"stagecoach/echo:1"}{}`, []string{"body"}},
		"wrong type":         {`{"service":"a","image":7}`, []string{"image"}},
		"wrong type, nested": {`{"service":"a","image":"stagecoach/echo:1","limits":{"cpu":7}}`, []string{"limits.cpu"}},
		"no name, no image":  {`{}`, []string{"service", "image"}},
		"slash in the name":  {`{"service":"a/b","image":"stagecoach/echo:1"}`, []string{"service"}},
		"unknown image":      {`{"service":"a","image":"nosuch:1"}`, []string{"image"}},
		"environment":        {`{"service":"a","image":"stagecoach/echo:1","envVars":{"a=b":"","c":"\u0000","d\u0000":""}}`, []string{"envVars", "envVars.c", "envVars"}},
		"large variables":    {`{"service":"a","image":"stagecoach/echo:1","envVars":{"e":"` + strings.Repeat("a", maxVariable-1) + `","ok":"` + strings.Repeat("a", maxVariable-3) + `"}}`, []string{"envVars"}},
		"several programs":   {`{"service":"a","image":"stagecoach/two:1"}`, []string{"envProcess"}},
		"mode":               {`{"service":"a","image":"stagecoach/echo:1","envVars":{"mode":"lambda"}}`, []string{"envVars.mode"}},
		"a broken model":     {`{"service":"a","image":"stagecoach/stage-a:1","envVars":{"STAGECOACH_MODEL":"broken.onnx"}}`, []string{"envVars.STAGECOACH_MODEL"}},
		"an image's model":   {`{"service":"a","image":"registry/broken"}`, []string{"image"}},
		"afterburn":          {`{"service":"a","image":"stagecoach/stage-a:1","envVars":{"mode":"afterburn"}}`, []string{"envVars.mode"}},
		"process":            {`{"service":"a","image":"stagecoach/echo:1","envProcess":"cat\u0000"}`, []string{"envProcess"}},
		"large process":      {`{"service":"a","image":"stagecoach/echo:1","envProcess":"` + strings.Repeat("a", 200_000) + `"}`, []string{"envProcess"}},
		"model above":        {`{"service":"a","image":"stagecoach/echo:1","envVars":{"STAGECOACH_MODEL":"../x"}}`, []string{"envVars.STAGECOACH_MODEL"}},
		"model out again":    {`{"service":"a","image":"stagecoach/echo:1","envVars":{"STAGECOACH_MODEL":"model/../../x"}}`, []string{"envVars.STAGECOACH_MODEL"}},
		"model of a machine": {`{"service":"a","image":"stagecoach/echo:1","envVars":{"STAGECOACH_MODEL":"/etc/passwd"}}`, []string{"envVars.STAGECOACH_MODEL"}},
		"least quantities": {
			`{"service":"a","image":"stagecoach/echo:1","limits":{"memory":"1","cpu":"0.0000001"},"requests":{"memory":"1","cpu":"0.0000001"}}`,
			[]string{"limits.memory", "limits.cpu", "requests.memory", "requests.cpu"},
		},
		"namespace":    {`{"service":"a","image":"stagecoach/echo:1","namespace":"a.b"}`, []string{"namespace"}},
		"label":        {`{"service":"a","image":"stagecoach/echo:1","labels":{"com.openfaas.scale.min":"many"}}`, []string{`labels["com.openfaas.scale.min"]`}},
		"dots":         {`{"service":"..","image":"stagecoach/echo:1"}`, []string{"service"}},
		"secrets":      {`{"service":"a","image":"stagecoach/echo:1","secrets":["s","../t"]}`, []string{"secrets[0]", "secrets[1]"}},
		"quantities":   {`{"service":"a","image":"stagecoach/echo:1","limits":{"memory":"much","cpu":"-1"},"requests":{"nvidia.com/gpu":"one"}}`, []string{"limits.memory", "limits.cpu", "requests.nvidia.com/gpu"}},
		"bad duration": {`{"service":"a","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/slo":"fast"}}`, []string{`annotations["stagecoach.dev/slo"]`}},
		"host network": {`{"service":"a","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/network":"host"}}`, []string{`annotations["stagecoach.dev/network"]`}},
		"class and device": {
			`{"service":"f","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/runtime-class":"gvisor","stagecoach.dev/cdi-devices":"vendor.com/device=null"}}`,
			[]string{`annotations["stagecoach.dev/runtime-class"]`, `annotations["stagecoach.dev/cdi-devices"]`},
		},
		"unknown annotation, and more": {
			`{"service":"a","annotations":{"stagecoach.dev/sol":"1s"}}`, []string{`annotations["stagecoach.dev/sol"]`, "image"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, method := range []string{post, put} {
				status, text := a.do(method, functions, tc.body)
				if status != http.StatusBadRequest {
					t.Errorf("%s: status %d, want 400", method, status)
				}
				for _, path := range tc.paths {
					if !strings.Contains(text, path+": ") {
						t.Errorf("%s: %q does not name %s", method, text, path)
					}
				}
				_, text = a.do(method, functions, tc.body, "Accept", "application/json")
				p := decodeJSON[problem](t, text)
				if len(p.Fields) != len(tc.paths) || p.Error == "" {
					t.Fatalf("%s: %s, want %d fields", method, text, len(tc.paths))
				}
				for i, f := range p.Fields {
					if f.Path != tc.paths[i] || f.Got == "" || f.Want == "" {
						t.Errorf("%s: field %+v, want path %q with got and want", method, f, tc.paths[i])
					}
				}
			}
		})
	}
	if status, _ := a.do(post, functions, `{"service":"`+strings.Repeat("a", maxBody)+`"}`); status != http.StatusRequestEntityTooLarge {
		t.Errorf("large body: status %d, want 413", status)
	}
	if n := len(a.Registry.Functions()); n != 0 {
		t.Errorf("%d functions, want none", n)
	}
}

// keep puts a function into the store under a name that a deploy refuses now, as an earlier version
// did.
func (a *api) keep(name, namespace string) {
	a.t.Helper()
	value, err := encode(Deployed{stored: stored{Deployment: types.FunctionDeployment{Service: name, Namespace: namespace, Image: "stagecoach/" + name + ":1"}}})
	if err != nil {
		a.t.Fatal(err)
	}
	rev, err := a.store.Put(a.t.Context(), pipeline.Key{Name: name, Namespace: namespace}.String(), value)
	if err == nil {
		err = a.Registry.wait(a.t.Context(), rev)
	}
	if err != nil {
		a.t.Fatal(err)
	}
}

// TestDotsAndNamespaces checks that the function that a request names depends only on the request's
// words, and never on which functions are deployed.
func TestDotsAndNamespaces(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.keep("v1.echo", "openfaas-fn")
	a.keep("echo", "team-a")
	a.keep("x", "team-a")
	a.keep("x.team-a", "openfaas-fn")
	a.keep("x.team-a", "team-a")
	for path, want := range map[string]string{
		"v1.echo":                           "",
		"v1.echo.openfaas-fn":               "v1.echo.openfaas-fn",
		"v1.echo?namespace=openfaas-fn":     "v1.echo.openfaas-fn",
		"v1.echo?namespace=":                "",
		"echo":                              "",
		"echo.team-a":                       "echo.team-a",
		"echo?namespace=team-a":             "echo.team-a",
		"echo?namespace=team-b":             "",
		"x":                                 "",
		"x?namespace=team-a.openfaas-fn":    "",
		"x.team-a":                          "x.team-a",
		"x.team-a?namespace=openfaas-fn":    "x.team-a.openfaas-fn",
		"x.team-a.openfaas-fn":              "x.team-a.openfaas-fn",
		"x.team-a?namespace=team-a":         "x.team-a.team-a",
		"x.team-a.team-a":                   "x.team-a.team-a",
		"x.":                                "",
		".team-a":                           "",
		"..":                                "",
		"%2e%2e%2fetc":                      "",
		"v1.echo.openfaas-fn.openfaas-fn":   "",
		"nosuch?usage=1&namespace=team%2da": "",
	} {
		status, text := a.do(get, "/system/function/"+path, "")
		if want == "" {
			if status == http.StatusOK {
				t.Errorf("%s: found %s", path, text)
			}
			continue
		}
		s := decodeJSON[types.FunctionStatus](t, text)
		if got := s.Name + "." + s.Namespace; got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	for query, want := range map[string]string{"": "v1.echo x.team-a", "?namespace=team-a": "echo x x.team-a"} {
		var names []string
		for _, s := range decodeJSON[[]types.FunctionStatus](t, a.must(http.StatusOK, get, functions+query, "")) {
			names = append(names, s.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("list%s: %q, want %q", query, got, want)
		}
	}
	if text := a.must(http.StatusOK, get, "/system/namespaces", ""); text != `["openfaas-fn","team-a"]`+"\n" {
		t.Errorf("namespaces: %s", text)
	}
	a.must(http.StatusOK, get, "/system/namespace/team-a", "")
	a.must(http.StatusNotFound, get, "/system/namespace/team-b", "")
}

// TestADotNeverReachesAnotherNamespace checks that x.team-a of the default namespace and x of
// team-a are different functions in every request.
func TestADotNeverReachesAnotherNamespace(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	names := func() (all []string) {
		for _, d := range a.Registry.Functions() {
			all = append(all, d.Declared.Name+" of "+d.Declared.Namespace)
		}
		return all
	}
	for _, tc := range []struct{ query, name, namespace, want string }{
		{"", "x.team-a", "", "x of team-a"},
		{"", "x", "team-a", "x of team-a"},
		{"?namespace=team-a", "x", "", "x of team-a"},
		// The body's namespace wins.
		{"?namespace=team-a", "x.team-a", "openfaas-fn", "x.team-a of openfaas-fn"},
		{"", "x.team-a", "openfaas-fn", "x.team-a of openfaas-fn"},
		{"?namespace=openfaas-fn", "x.team-a", "", "x.team-a of openfaas-fn"},
		{"", "x.team-a.openfaas-fn", "", "x.team-a of openfaas-fn"},
	} {
		a.keep("x", "team-a")
		a.keep("x.team-a", "openfaas-fn")
		before := names()
		scale := fmt.Sprintf(`{"serviceName":%q,"namespace":%q,"replicas":3}`, tc.name, tc.namespace)
		remove := fmt.Sprintf(`{"functionName":%q,"namespace":%q}`, tc.name, tc.namespace)
		clear(a.fakes.scaled)
		a.must(http.StatusAccepted, post, "/system/scale-function/"+tc.name+tc.query, scale)
		key := strings.Replace(tc.want, " of ", ".", 1)
		if len(a.fakes.scaled) != 1 || a.fakes.scaled[key] != 3 {
			t.Errorf("%+v: scaled %v, want %s alone", tc, a.fakes.scaled, tc.want)
		}
		a.must(http.StatusAccepted, del, functions+tc.query, remove)
		if gone := slices.DeleteFunc(before, func(n string) bool { return slices.Contains(names(), n) }); len(gone) != 1 || gone[0] != tc.want {
			t.Errorf("%+v: removed %q, want %s alone", tc, gone, tc.want)
		}
		a.must(http.StatusNotFound, del, functions+tc.query, remove) // never the other function
	}
}

// TestDeployAcceptsValuesAtTheBounds checks values at the bounds.
func TestDeployAcceptsValuesAtTheBounds(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"least","image":"stagecoach/echo:1","envProcess":"`+strings.Repeat("a", 100_000)+
		`","envVars":{"STAGECOACH_MODEL":"model/./a/../model.onnx"},"limits":{"memory":"4Mi","cpu":"1m"},"requests":{"memory":"0","cpu":"0.001"}}`)
}

func TestSystemPathsNeedCredentials(t *testing.T) {
	synctest.Test(t, testAuth) // answers to wrong passwords are delayed
}

func testAuth(t *testing.T) {
	a := newAPI(t, newMemoryStore(), &Credentials{"admin", "secret"})
	routes := []string{
		"GET /system/functions", "POST /system/functions", "PUT /system/functions", "DELETE /system/functions",
		"GET /system/function/x", "POST /system/scale-function/x", "GET /system/info", "GET /system/namespaces",
		"GET /system/namespace/x", "POST /system/namespace/", "GET /system/pipelines", "GET /system/pipelines/x",
		"GET /system/secrets", "GET /system/logs", "GET /system/nosuch", "PATCH /system/functions",
		"GET /system", "POST /system", "GET /system/", "GET /system/functions/", "GET /system/..", "GET /system/../healthz", "GET /system/.", "GET //system",
		"GET //system/functions", "GET /system//functions", "GET /./system/functions", "GET /x/../system/functions", "GET /healthz/../system/info",
		"GET /%73ystem", "GET /x/%2e%2e/system", "GET /system%2ffunctions", "CONNECT //system",
	}
	for _, user := range [][2]string{{}, {"admin", "wrong"}, {"admin", ""}, {"root", "secret"}, {"", "secret"}} {
		a.user, a.pass = user[0], user[1]
		for _, r := range routes {
			method, path, _ := strings.Cut(r, " ")
			a.must(http.StatusUnauthorized, method, path, `{}`)
		}
	}
	a.must(http.StatusOK, get, "/healthz", "")
	for _, path := range []string{"/", "/systemd", "/nosuch", "/healthz/system"} {
		a.must(http.StatusNotFound, get, path, "")
	}
	a.user, a.pass = "admin", "secret"
	for _, r := range routes {
		method, path, _ := strings.Cut(r, " ")
		if status, _ := a.do(method, path, `{}`); status == http.StatusUnauthorized {
			t.Errorf("%s: 401 with the right password", r)
		}
	}
	if _, err := New(Config{}); err == nil {
		t.Error("New accepts an empty Config")
	}
	c := a.Config
	c.Credentials = &Credentials{User: "admin"}
	if _, err := New(c); err == nil {
		t.Error("New accepts an empty password")
	}
}

func TestReadCredentials(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("basic-auth-user", "admin\n")
	if _, err := ReadCredentials(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no password file: %v", err)
	}
	write("basic-auth-password", " \n")
	if _, err := ReadCredentials(dir); err == nil {
		t.Error("an empty password is accepted")
	}
	write("basic-auth-password", "secret\n")
	if c, err := ReadCredentials(dir); err != nil || *c != (Credentials{"admin", "secret"}) {
		t.Errorf("credentials %v, %v", c, err)
	}
}

// TestOtherOriginsCannotDeploy checks that a web page in the operator's browser cannot deploy
// functions to an API without a password on the same machine.
func TestOtherOriginsCannotDeploy(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	const echo = `{"service":"echo","image":"stagecoach/echo:1"}`
	if status, _ := a.do(post, functions, echo, "Sec-Fetch-Site", "cross-site"); status != http.StatusForbidden {
		t.Errorf("cross-site: status %d, want 403", status)
	}
	if status, _ := a.do(post, functions, echo, "Origin", "https://evil.example"); status != http.StatusForbidden {
		t.Errorf("other origin: status %d, want 403", status)
	}
	if status, _ := a.do(post, functions, echo, "Sec-Fetch-Site", "same-origin"); status != http.StatusAccepted {
		t.Errorf("same origin: status %d, want 202", status)
	}
}

func TestUnknownNamesAreRefused(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusNotFound, get, "/system/nosuch", "")
	a.must(http.StatusNotFound, get, "/", "")
	a.must(http.StatusMethodNotAllowed, "PATCH", functions, "")
	// forwarded by a gateway.
	_, text := a.do(get, "/system/info", "", "X-Forwarded-Host", "gateway.example")
	if info := decodeJSON[types.ProviderInfo](t, text); info.Name != "stagecoach" || info.Version.Release != "v0.1.0" {
		t.Errorf("info %+v", info)
	}
}

func TestDescribeShowsWhatRuns(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"echo","image":"stagecoach/echo:1","annotations":{"a":"b"}}`)
	const key = "echo.openfaas-fn"
	a.fakes.states[key] = State{Replicas: 3, Available: 1, Invocations: 7, Status: "node n1:\n no model.onnx"}
	a.fakes.usage[key] = Usage{CPUMilli: 250, MemoryBytes: 1 << 20}
	s := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo?usage=1", ""))
	if s.Replicas != 3 || s.AvailableReplicas != 1 || s.InvocationCount != 7 {
		t.Errorf("status %+v", s)
	}
	if s.Usage == nil || *s.Usage != (types.FunctionUsage{CPU: 250, TotalMemoryBytes: 1 << 20}) {
		t.Errorf("usage %+v", s.Usage)
	}
	a.fakes.replicas[key] = []Replica{
		{Name: "echo-a", Node: "n1", State: "ready", Path: "fork", Ready: 8800 * time.Microsecond, Answered: time.Second, Phases: []node.Phase{
			{Name: "order", Took: 300 * time.Microsecond},
			{Name: "fork", Took: 4200 * time.Microsecond},
			{Name: "place", Took: 4300 * time.Microsecond},
			{Name: "first inference", Took: 7 * time.Millisecond},
		}},
		{Name: "echo-b", Node: "n2", State: "starting", Hidden: true},
		{Name: "echo-c", Node: "n1", State: "draining", Older: true},
	}
	const replicas = "echo-a on n1: ready, fork, ready after 8.8ms (order 300µs, fork 4.2ms, place 4.3ms, first inference 7ms), first answer after 1s; " +
		"echo-b on n2: starting, its node is silent; echo-c on n1: draining, of an older revision"
	s = decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo", ""))
	if got := (*s.Annotations)[ReplicasAnnotation]; got != replicas {
		t.Errorf("replicas %q, want %q", got, replicas)
	}
	if got := (*s.Annotations)[StatusAnnotation]; got != "node n1: no model.onnx" || (*s.Annotations)["a"] != "b" {
		t.Errorf("annotations %v", *s.Annotations)
	}
	if s := decodeJSON[[]types.FunctionStatus](t, a.must(http.StatusOK, get, functions, "")); s[0].Replicas != 3 || s[0].Usage != nil {
		t.Errorf("listed %+v, want replicas and no usage", s[0])
	}
	// A described function can be deployed again, without the answer's own annotation.
	back, err := json.Marshal(map[string]any{"service": s.Name, "image": s.Image, "annotations": s.Annotations})
	if err != nil {
		t.Fatal(err)
	}
	a.must(http.StatusAccepted, put, functions, string(back))
	if m := *a.Registry.Functions()[0].Deployment.Annotations; len(m) != 1 {
		t.Errorf("annotations %v, want a alone", m)
	}
}

func TestScale(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	for _, name := range []string{"echo", "broken"} {
		a.must(http.StatusAccepted, post, functions, `{"service":"`+name+`","image":"stagecoach/echo:1","labels":{"com.openfaas.scale.max":"20"}}`)
	}
	a.must(http.StatusAccepted, post, "/system/scale-function/echo", `{"serviceName":"echo","replicas":5}`)
	if got := a.fakes.scaled["echo.openfaas-fn"]; got != 5 {
		t.Errorf("scaled to %d, want 5", got)
	}
	for body, want := range map[string]string{
		`{"replicas":21}`: "replicas: ", `{"replicas":-1}`: "replicas: ", `{"replicas":99999999999999999999}`: "replicas: ",
		`{"serviceName":"other","replicas":1}`: "serviceName: ", `x`: "body: ",
		`null`: "replicas: ", `{}`: "replicas: ", `{"serviceName":"echo"}`: "replicas: ", `{"replicas":null}`: "replicas: ", `{"serviceName":"echo","replica":3}`: `"replica": `,
		`{"replicas":1.5}`: "replicas: ", `{"replicas":"1"}`: "replicas: ", `{"replicas":1,"min":2}`: `"min": `, `[]`: "body: ", `{"replicas":1}{}`: "body: ", ``: "body: ",
	} {
		if text := a.must(http.StatusBadRequest, post, "/system/scale-function/echo", body); !strings.Contains(text, want) {
			t.Errorf("%s: %q, want it to name %q", body, text, want)
		}
	}
	if got := a.fakes.scaled["echo.openfaas-fn"]; got != 5 {
		t.Errorf("scaled to %d by what was refused, want it left at 5", got)
	}
	for body, want := range map[string]int{
		`{"serviceName":"echo","replicas":0}`: 0, `{"serviceName":"echo","replicas":2,"namespace":"openfaas-fn"}`: 2, `{"serviceName":"echo","replicas":3,"namespace":""}`: 3, `{"replicas":20}`: 20,
	} {
		a.must(http.StatusAccepted, post, "/system/scale-function/echo", body)
		if got := a.fakes.scaled["echo.openfaas-fn"]; got != want {
			t.Errorf("%s: scaled to %d", body, got)
		}
	}
	a.must(http.StatusNotFound, post, "/system/scale-function/nosuch", `{"replicas":1}`)
	a.must(http.StatusServiceUnavailable, post, "/system/scale-function/broken", `{"replicas":1}`)
}

func TestPipelines(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	if text := a.must(http.StatusOK, get, "/system/pipelines", ""); text != "[]\n" {
		t.Errorf("pipelines: %q, want []", text)
	}
	a.must(http.StatusAccepted, post, functions,
		`{"service":"detect","image":"stagecoach/d:1","annotations":{"stagecoach.dev/pipeline":"ocr","stagecoach.dev/next":"read","stagecoach.dev/slo":"400ms"}}`)
	p := decodeJSON[PipelineStatus](t, a.must(http.StatusOK, get, "/system/pipelines/ocr", ""))
	if p.Ready || len(p.Faults) == 0 {
		t.Fatalf("without its successor: %+v", p)
	}
	if f := p.Faults[0]; f.Function != "detect" || f.Annotation != "stagecoach.dev/next" || f.Got == "" || f.Want == "" {
		t.Errorf("fault %+v", f)
	}
	a.must(http.StatusAccepted, post, functions, `{"service":"read","image":"stagecoach/r:1","annotations":{"stagecoach.dev/pipeline":"ocr","stagecoach.dev/join":"1"}}`)
	a.fakes.states["read.openfaas-fn"] = State{Replicas: 2, Available: 1, Status: "starting"}
	for _, path := range []string{"ocr", "ocr.openfaas-fn", "ocr?namespace=openfaas-fn"} {
		p = decodeJSON[PipelineStatus](t, a.must(http.StatusOK, get, "/system/pipelines/"+path, ""))
		if !p.Ready || p.Entry != "detect" || len(p.Stages) != 2 || p.SLO != "400ms" {
			t.Fatalf("%s: %+v", path, p)
		}
	}
	if s := p.Stages; s[0].Name != "detect" || s[0].Next[0].To != "read" || s[1].Replicas != 2 || s[1].AvailableReplicas != 1 || s[1].Status != "starting" {
		t.Errorf("stages %+v", s)
	}
	a.must(http.StatusNotFound, get, "/system/pipelines/nosuch", "")
	a.must(http.StatusNotFound, get, "/system/pipelines/detect", "") // the name of a function
	if g, ok := a.Registry.Graph(pipeline.ParseKey("ocr.openfaas-fn")); !ok || len(g.Stages) != 2 {
		t.Errorf("graph of the pipeline: %+v, %t", g, ok)
	}
	if g, ok := a.Registry.Graph(pipeline.ParseKey("detect.openfaas-fn")); !ok || len(g.Stages) != 1 || len(g.Stages[0].Next) != 0 || g.Entry != "detect" || len(g.Faults) != 0 {
		t.Errorf("graph of the function alone: %+v, %t", g, ok)
	}
	if g, ok := a.Registry.Graph(pipeline.ParseKey("read.openfaas-fn")); !ok || g.Stages[0].Join != 0 {
		t.Errorf("graph of a function alone waits for a predecessor: %+v, %t", g, ok)
	}
	if a.Registry.Known(pipeline.ParseKey("ocr")) || !a.Registry.Known(pipeline.ParseKey("ocr.openfaas-fn")) || !a.Registry.Known(pipeline.ParseKey("read.openfaas-fn")) {
		t.Error("the keys of a pipeline and a function are to be known, and nothing else")
	}
}

// TestADeployNamesWhatIsMissing checks functions deployed in any order. Each answer must name the
// faults of the function's pipelines, until there are none.
func TestADeployNamesWhatIsMissing(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	stage := func(method, name, annotations string) string {
		t.Helper()
		return a.must(http.StatusAccepted, method, functions,
			fmt.Sprintf(`{"service":%q,"image":"stagecoach/x:1","annotations":{"stagecoach.dev/pipeline":"p,q"%s}}`, name, annotations))
	}
	const next = `,"stagecoach.dev/next":`
	got := stage(post, "a", next+`"b, c"`)
	want := "deployed a.openfaas-fn"
	for _, p := range []string{"p", "q"} {
		want += fmt.Sprintf("\npipeline \"%s.openfaas-fn\" cannot run so far:", p)
		for _, missing := range []string{"b", "c"} {
			want += fmt.Sprintf("\n  function \"a\", annotation stagecoach.dev/next: got %q, which is not deployed, want a deployed function of the same namespace", missing)
		}
	}
	if strings.TrimSpace(got) != want {
		t.Errorf("after a: %s\nwant %s", got, want)
	}
	if got := stage(post, "b", ""); !strings.Contains(got, `got "c", which is not deployed`) || strings.Contains(got, `got "b"`) {
		t.Errorf("after b: %s\nwant c to be named alone", got)
	}
	if got := stage(post, "c", ""); strings.TrimSpace(got) != "deployed c.openfaas-fn" {
		t.Errorf("the whole graph: %s\nwant no fault", got)
	}
	if got := stage(put, "c", next+`"a"`); !strings.Contains(got, "the cycle a > c > a") {
		t.Errorf("a cycle: %s\nwant it to be named", got)
	}
	got = a.must(http.StatusAccepted, post, functions, `{"service":"alone","image":"stagecoach/x:1"}`)
	if strings.TrimSpace(got) != "deployed alone.openfaas-fn" {
		t.Errorf("a function without a pipeline: %s\nwant no word of pipelines", got)
	}
	names := make([]string, 30)
	for i := range names {
		names[i] = fmt.Sprintf("s%d", i)
	}
	if got := stage(put, "c", next+strconv.Quote(strings.Join(names, ","))); !strings.Contains(got, "and 10 more faults") || strings.Count(got, "\n") > 50 {
		t.Errorf("many faults: %s\nwant 20 and a count per pipeline", got)
	}
}

func TestRegistryAfterARestart(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"echo","image":"stagecoach/echo:1"}`)
	a.must(http.StatusAccepted, post, functions, `{"service":"gone","image":"stagecoach/echo:1"}`)
	a.must(http.StatusAccepted, del, functions, `{"functionName":"gone"}`)
	before := a.Registry.Functions()
	for key, value := range map[string]string{
		"future.openfaas-fn": `{"version":99,"deployment":{"service":"future","image":"i","namespace":"openfaas-fn"}}`,
		"broken.openfaas-fn": `{"version":`,
		"wrong.openfaas-fn":  `{"version":1,"deployment":{"service":"other","image":"i","namespace":"openfaas-fn"}}`,
		"bad.openfaas-fn":    `{"version":1,"deployment":{"service":"bad","image":"i","namespace":"openfaas-fn","annotations":{"stagecoach.dev/slo":"x"}}}`,
	} {
		if _, err := store.Put(t.Context(), key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	b := newAPI(t, store, nil)
	after := b.Registry.Functions()
	if len(after) != 1 || after[0].Key.String() != "echo.openfaas-fn" || after[0].Revision != before[0].Revision || !after[0].CreatedAt.Equal(before[0].CreatedAt) {
		t.Errorf("after a restart %+v, want %+v", after, before)
	}
	b.must(http.StatusOK, get, "/system/function/echo", "")
	// Replaces a record that cannot be read.
	b.must(http.StatusAccepted, post, functions, `{"service":"future","image":"stagecoach/echo:1"}`)
}

// TestOldNamesStillServe checks a function that an earlier version stored under a name that is
// refused now. The function still serves and can be removed.
func TestOldNamesStillServe(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	a.keep("Old.one", "openfaas-fn")
	var log strings.Builder
	reg, err := OpenRegistry(t.Context(), store, newLog(&log))
	if err != nil {
		t.Fatal(err)
	}
	reg.Close()
	if text := log.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "function=Old.one.openfaas-fn") || !strings.Contains(text, "new name") {
		t.Errorf("log %s, want one warning that says what to do", text)
	}
	if text := a.must(http.StatusOK, get, functions, ""); !strings.Contains(text, `"Old.one"`) {
		t.Errorf("list %s", text)
	}
	const old = "Old.one?namespace=openfaas-fn"
	a.must(http.StatusOK, get, "/system/function/"+old, "")
	a.must(http.StatusAccepted, post, "/system/scale-function/"+old, `{"replicas":2}`)
	for _, method := range []string{put, post} {
		text := a.must(http.StatusBadRequest, method, functions, `{"service":"Old.one","namespace":"openfaas-fn","image":"stagecoach/echo:1"}`)
		if !strings.Contains(text, `service: got "Old.one", want 1 to 63 lower-case letters`) || !strings.Contains(text, "deploy it under such a name") {
			t.Errorf("%s: %s", method, text)
		}
	}
	text := a.must(http.StatusBadRequest, post, functions, `{"service":"f","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/pipeline":"my.pipe","stagecoach.dev/next":"Old.one"}}`)
	if !strings.Contains(text, `annotations["stagecoach.dev/pipeline"]`) || !strings.Contains(text, `annotations["stagecoach.dev/next"]`) {
		t.Errorf("a pipeline's name: %s", text)
	}
	a.must(http.StatusAccepted, del, functions, `{"functionName":"Old.one","namespace":"openfaas-fn"}`)
	a.must(http.StatusNotFound, get, "/system/function/"+old, "")
}

// in returns a deployment that belongs to the comma-separated pipelines.
func in(pipelines, name string) string {
	if pipelines == "" {
		return `{"service":"` + name + `","image":"stagecoach/x:1"}`
	}
	return `{"service":"` + name + `","image":"stagecoach/x:1","annotations":{"stagecoach.dev/pipeline":"` + pipelines + `"}}`
}

// TestFunctionAndPipelineCannotShareAName checks both orders of deploys.
func TestFunctionAndPipelineCannotShareAName(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, in("ocr", "detect"))
	for _, taken := range []string{in("", "ocr"), in("other", "ocr")} {
		if text := a.must(http.StatusConflict, post, functions, taken); !strings.Contains(text, `service: got "ocr"`) || !strings.Contains(text, "(detect)") || !strings.Contains(text, "stagecoach.dev/pipeline") {
			t.Errorf("a function of the pipeline's name: %s, want where the pipeline is declared", text)
		}
	}
	// Names belong to a namespace.
	a.must(http.StatusAccepted, post, functions+"?namespace=team-a", in("", "ocr"))

	a.must(http.StatusAccepted, post, functions, in("", "read"))
	for method, body := range map[string]string{post: in("books,read", "page"), put: in("read", "detect")} {
		if text := a.must(http.StatusConflict, method, functions, body); !strings.Contains(text, `annotations["stagecoach.dev/pipeline"]: got "read"`) || !strings.Contains(text, "stagecoach/x:1") {
			t.Errorf("a pipeline of the function's name: %s, want which function", text)
		}
	}
	if got := len(a.Registry.Pipelines()); got != 1 {
		t.Errorf("%d pipelines, want ocr alone", got)
	}

	// A stage may have the pipeline's name, and may leave the pipeline only if it is the last.
	a.must(http.StatusAccepted, post, functions, in("ocr", "ocr"))
	a.must(http.StatusConflict, put, functions, in("", "ocr"))
	a.must(http.StatusAccepted, del, functions, `{"functionName":"detect"}`)
	a.must(http.StatusAccepted, put, functions, in("", "ocr"))
	a.must(http.StatusConflict, post, functions, in("ocr", "detect"))

	// A variant is not a stage, so it declares no pipeline.
	text := a.must(http.StatusBadRequest, post, functions, strings.Replace(in("ocr", "light"), `"stagecoach.dev/p`, `"stagecoach.dev/variant-of":"x","stagecoach.dev/p`, 1))
	if !strings.Contains(text, `annotations["stagecoach.dev/pipeline"]: got "ocr", want none beside`) {
		t.Errorf("a variant that names a pipeline: %s", text)
	}
}

// TestAnEntryOfThePipelinesName checks that the name means the pipeline, whichever stage is
// deployed first.
func TestAnEntryOfThePipelinesName(t *testing.T) {
	entry := `{"service":"ocr","image":"stagecoach/x:1","annotations":{"stagecoach.dev/pipeline":"ocr","stagecoach.dev/next":"read"}}`
	for name, bodies := range map[string][]string{"entry first": {entry, in("ocr", "read")}, "entry last": {in("ocr", "read"), entry}} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t, newMemoryStore(), nil)
			a.must(http.StatusAccepted, post, functions, bodies[0])
			if name == "entry first" {
				if g, ok := a.Registry.Graph(pipeline.ParseKey("ocr.openfaas-fn")); !ok || len(g.Faults) != 1 {
					t.Errorf("before its sibling came: %+v, want the pipeline with a fault", g)
				}
			}
			a.must(http.StatusAccepted, post, functions, bodies[1])
			g, ok := a.Registry.Graph(pipeline.ParseKey("ocr.openfaas-fn"))
			if !ok || len(g.Stages) != 2 || g.Entry != "ocr" || len(g.Faults) != 0 || a.Registry.Alone(pipeline.ParseKey("ocr.openfaas-fn")) {
				t.Errorf("ocr is %+v, %t, want the pipeline", g, ok)
			}
			if g, ok := a.Registry.Graph(pipeline.ParseKey("read.openfaas-fn")); !ok || len(g.Stages) != 1 || !a.Registry.Alone(pipeline.ParseKey("read.openfaas-fn")) {
				t.Errorf("read is %+v, %t, want the function alone", g, ok)
			}
		})
	}
}

// TestNameHasAGraphDuringChanges checks that a name always has a graph while a function joins and
// leaves the pipeline of its name.
func TestNameHasAGraphDuringChanges(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	key := pipeline.ParseKey("ocr.openfaas-fn")
	a.must(http.StatusAccepted, post, functions, in("", "ocr"))
	done := make(chan struct{})
	var missing int
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			if _, ok := a.Registry.Graph(key); !ok {
				missing++
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	a.must(http.StatusAccepted, put, functions, in("ocr", "ocr"))
	stage := a.store.entries[key.String()]
	a.must(http.StatusAccepted, put, functions, in("", "ocr"))
	alone := a.store.entries[key.String()]
	for i := range 500 {
		a.Registry.apply([]Entry{stage, alone}[i%2])
	}
	close(done)
	reader.Wait()
	if missing > 0 {
		t.Errorf("%d times, there was nothing of the name", missing)
	}
}

// TestOneOfTwoDeploysGetsTheName checks two deploys at the same time.
func TestOneOfTwoDeploysGetsTheName(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	for i := range 50 {
		name := fmt.Sprint("p", i)
		var codes [2]int
		var both sync.WaitGroup
		for k, body := range []string{in("", name), in(name, "stage-"+name)} {
			both.Go(func() { codes[k], _ = a.do(post, functions, body) })
		}
		both.Wait()
		if slices.Sort(codes[:]); codes != [2]int{http.StatusAccepted, http.StatusConflict} {
			t.Fatalf("%s: statuses %v, want one 202 and one 409", name, codes)
		}
	}
}

// TestDeployWaitsForTheEarlierDeploy checks that a deploy whose request gave up before the registry
// showed it is stored nevertheless.
func TestDeployWaitsForTheEarlierDeploy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemoryStore()
		a := newAPI(t, store, nil)
		store.silent = true
		gone, leave := context.WithCancel(t.Context())
		leave()
		var d types.FunctionDeployment
		if err := json.Unmarshal([]byte(in("p", "stage")), &d); err != nil {
			t.Fatal(err)
		}
		d.Namespace = pipeline.DefaultNamespace
		f, err := parse(d, pipeline.Parse)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Provider.store(gone, Deployed{Key: pipeline.ParseKey("stage.openfaas-fn"), Declared: f, stored: stored{Deployment: d}}, true); !errors.Is(err, context.Canceled) {
			t.Fatalf("a deploy that nobody waits for: %v", err)
		}
		answered := make(chan int, 1)
		go func() {
			status, _ := a.do(post, functions, in("", "p"))
			answered <- status
		}()
		synctest.Wait()
		a.Registry.apply(store.entries["stage.openfaas-fn"])
		if status := <-answered; status != http.StatusConflict {
			t.Errorf("status %d, want 409: the pipeline was stored first", status)
		}
	})
}

// TestDeployIsAnsweredWhenVisible checks that a deploy is answered once readers and listeners see
// it, and not before.
func TestDeployIsAnsweredWhenVisible(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, newMemoryStore(), nil)
		told, hold := 0, make(chan struct{})
		a.Registry.OnChange(func(Change) {
			if _, ok := a.Registry.Graph(pipeline.ParseKey("echo.openfaas-fn")); ok {
				told++
			}
			<-hold
		})
		answered := make(chan int, 1)
		go func() {
			status, _ := a.do(post, functions, `{"service":"echo","image":"stagecoach/echo:1"}`)
			answered <- status
		}()
		synctest.Wait()
		select {
		case status := <-answered:
			t.Fatalf("answered %d while a listener did not know", status)
		default:
		}
		close(hold)
		if status := <-answered; status != http.StatusAccepted || told != 1 {
			t.Errorf("status %d after %d calls of the listener, want 202 after 1", status, told)
		}
	})
}

func TestDeployReportsAFailingStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, newMemoryStore(), nil)
		const echo = `{"service":"echo","image":"stagecoach/echo:1"}`
		a.store.refuse = errors.New("no space left")
		if text := a.must(http.StatusServiceUnavailable, post, functions, echo); !strings.Contains(text, "no space left") {
			t.Errorf("refused: %q", text)
		}
		a.store.refuse, a.store.silent = nil, true
		// After 10 s of fake time.
		if text := a.must(http.StatusServiceUnavailable, post, functions, echo); !strings.Contains(text, "not yet seen") {
			t.Errorf("unseen: %q", text)
		}
		if text := a.must(http.StatusServiceUnavailable, post, functions, echo); !strings.Contains(text, `"echo.openfaas-fn" is not deployed, try again: the deploy before it`) {
			t.Errorf("after one that is unseen: %q", text)
		}
	})
}

// TestConcurrentDeploysAndReaders deploys from many clients while others read. With the race
// detector, it checks that returned values do not change.
func TestConcurrentDeploysAndReaders(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	const n = 20
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			name := fmt.Sprintf("f%d", i)
			body := fmt.Sprintf(`{"service":%q,"image":"stagecoach/f:1","annotations":{"stagecoach.dev/pipeline":"p%d"}}`, name, i)
			if status, text := a.do(put, functions, body); status != http.StatusNotFound {
				t.Errorf("update %s: %d %s", name, status, text)
			}
			if status, text := a.do(post, functions, body); status != http.StatusAccepted {
				t.Errorf("create %s: %d %s", name, status, text)
			}
			if g, ok := a.Registry.Graph(pipeline.ParseKey(fmt.Sprintf("p%d.openfaas-fn", i))); !ok || g.Entry != name {
				t.Errorf("pipeline of %s after its deploy: %+v, %t", name, g, ok)
			}
			a.do(get, functions, "")
		})
	}
	wg.Wait()
	got := a.Registry.Functions()
	if len(got) != n || len(a.Registry.Pipelines()) != n {
		t.Errorf("%d functions and %d pipelines, want %d each", len(got), len(a.Registry.Pipelines()), n)
	}
	if !slices.IsSortedFunc(got, func(x, y *Deployed) int { return strings.Compare(x.Key.String(), y.Key.String()) }) {
		t.Error("functions are not sorted")
	}
}

// TestFunctionBeforePipeline checks a name under which an earlier version stored both a function
// and a pipeline. An invocation of the name runs the function. The pipeline is shown with its
// fault.
func TestFunctionBeforePipeline(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"read","image":"stagecoach/r:1","annotations":{"stagecoach.dev/pipeline":"ocr"}}`)
	a.keep("ocr", "openfaas-fn")
	if g, ok := a.Registry.Graph(pipeline.ParseKey("ocr.openfaas-fn")); !ok || g.Entry != "ocr" || len(g.Faults) != 0 {
		t.Errorf("graph %+v, %t, want the function alone", g, ok)
	}
	if p := decodeJSON[PipelineStatus](t, a.must(http.StatusOK, get, "/system/pipelines/ocr", "")); p.Ready || len(p.Faults) == 0 {
		t.Errorf("pipeline %+v, want a fault", p)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add("echo.openfaas-fn", []byte(`{"version":1,"deployment":{"service":"echo","image":"i","namespace":"openfaas-fn"},"createdAt":"2026-01-02T03:04:05Z"}`))
	f.Add("a.b", []byte(`{"version":1,"deployment":{"service":"a","namespace":"b","labels":null,"annotations":{"stagecoach.dev/next":"c"}}}`))
	f.Add("", []byte(`{`))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		d, err := decode(Entry{Key: key, Value: value, Revision: 7})
		if err != nil {
			return
		}
		b, err := encode(d)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decode(Entry{Key: key, Value: b, Revision: 7})
		if err != nil || again.Key != d.Key || !again.CreatedAt.Equal(d.CreatedAt) || again.Declared.Name != d.Declared.Name {
			t.Fatalf("%+v, then %+v (%v)", d, again, err)
		}
	})
}

// TestReadyzSaysWhatIsRefused checks that /readyz names the refused requests and the cause, while
// /healthz succeeds.
func TestReadyzSaysWhatIsRefused(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusOK, get, "/readyz", "")
	a.fakes.unready = &disk.FullError{Path: "/state/nats", Free: 7, Want: 64 << 20}
	if text := a.must(http.StatusServiceUnavailable, get, "/readyz", ""); !strings.Contains(text, "degraded: the disk of /state/nats has 7 bytes left, want 67108864") {
		t.Errorf("%q, want the cause", text)
	}
	a.must(http.StatusOK, get, "/healthz", "")
}

// TestFullDisk checks that every request that finds a disk full gets 503 with the disk's name.
func TestFullDisk(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	full := &disk.FullError{Path: "/state/nats", Free: 7, Want: 4096}
	if text := a.must(http.StatusServiceUnavailable, post, functions, `{"service":"f","image":"full/f:1"}`); !strings.Contains(text, "/state/images has 7 bytes left, want 4096") {
		t.Errorf("%q, want the disk of the images", text)
	}
	a.store.refuse = full
	for _, body := range []string{`{"service":"f","image":"stagecoach/f:1"}`} {
		if text := a.must(http.StatusServiceUnavailable, post, functions, body); !strings.Contains(text, full.Error()) {
			t.Errorf("%q, want %q", text, full)
		}
	}
}
