package provider

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openfaas/faas-provider/types"
)

func decodeJSON[T any](t *testing.T, text string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return v
}

// TestLife follows a function the way faas-cli leads it: an update that finds nothing, a create, an update, a delete.
func TestLife(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	const echo = `{"service":"echo","image":"stagecoach/echo:1","envProcess":"cat","envVars":{"K":"v"},"labels":{"l":"1"},"annotations":{"a":"2"}}`
	a.must(http.StatusNotFound, put, functions, echo)
	a.must(http.StatusAccepted, post, functions, echo)
	if text := a.must(http.StatusConflict, post, functions, echo); !strings.Contains(text, "echo.openfaas-fn") {
		t.Errorf("second create: %q does not name the function", text)
	}
	first := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo", ""))
	if first.Name != "echo" || first.Namespace != DefaultNamespace || first.EnvVars["K"] != "v" || (*first.Labels)["l"] != "1" ||
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
		"environment":        {`{"service":"a","image":"stagecoach/echo:1","envVars":{"a=b":"","c":"\u0000"}}`, []string{"envVars", "envVars.c"}},
		"namespace":          {`{"service":"a","image":"stagecoach/echo:1","namespace":"a.b"}`, []string{"namespace"}},
		"label":              {`{"service":"a","image":"stagecoach/echo:1","labels":{"com.openfaas.scale.min":"many"}}`, []string{`labels["com.openfaas.scale.min"]`}},
		"dots":               {`{"service":"..","image":"stagecoach/echo:1"}`, []string{"service"}},
		"secrets":            {`{"service":"a","image":"stagecoach/echo:1","secrets":["s","../t"]}`, []string{"secrets[0]", "secrets[1]"}},
		"quantities":         {`{"service":"a","image":"stagecoach/echo:1","limits":{"memory":"much","cpu":"-1"},"requests":{"nvidia.com/gpu":"one"}}`, []string{"limits.memory", "limits.cpu", "requests.nvidia.com/gpu"}},
		"bad duration":       {`{"service":"a","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/slo":"fast"}}`, []string{`annotations["stagecoach.dev/slo"]`}},
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

func TestDotsAndNamespaces(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	deploy := func(name, ns string) {
		t.Helper()
		a.must(http.StatusAccepted, post, functions, `{"service":"`+name+`","image":"stagecoach/`+name+`:1","namespace":"`+ns+`"}`)
	}
	deploy("v1.echo", "")
	deploy("echo", "team-a")
	deploy("x", "team-a")
	deploy("x.team-a", "") // under this name, the URL means x in team-a
	for path, want := range map[string]string{
		"v1.echo":                           "v1.echo.openfaas-fn",
		"v1.echo.openfaas-fn":               "v1.echo.openfaas-fn",
		"v1.echo?namespace=openfaas-fn":     "v1.echo.openfaas-fn",
		"echo":                              "",
		"echo.team-a":                       "echo.team-a",
		"echo?namespace=team-a":             "echo.team-a",
		"echo?namespace=team-b":             "",
		"x.team-a":                          "x.team-a",
		"x.team-a?namespace=openfaas-fn":    "x.team-a.openfaas-fn",
		"x.team-a.openfaas-fn":              "x.team-a.openfaas-fn",
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
	for query, want := range map[string]string{"": "v1.echo x.team-a", "?namespace=team-a": "echo x", "?namespace=none": ""} {
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
	a.must(http.StatusAccepted, del, functions, `{"functionName":"x","namespace":"team-a"}`)
	a.must(http.StatusAccepted, del, functions+"?namespace=team-a", `{"functionName":"echo"}`)
	a.must(http.StatusOK, get, "/system/function/x.team-a", "") // now the one in the default namespace
}

func TestAuth(t *testing.T) {
	a := newAPI(t, newMemoryStore(), &Credentials{"admin", "secret"})
	routes := []string{
		"GET /system/functions", "POST /system/functions", "PUT /system/functions", "DELETE /system/functions",
		"GET /system/function/x", "POST /system/scale-function/x", "GET /system/info", "GET /system/namespaces",
		"GET /system/namespace/x", "POST /system/namespace/", "GET /system/pipelines", "GET /system/pipelines/x",
		"GET /system/secrets", "GET /system/logs", "GET /system/nosuch", "PATCH /system/functions",
	}
	for _, user := range [][2]string{{}, {"admin", "wrong"}, {"admin", ""}, {"root", "secret"}, {"", "secret"}} {
		a.user, a.pass = user[0], user[1]
		for _, r := range routes {
			method, path, _ := strings.Cut(r, " ")
			a.must(http.StatusUnauthorized, method, path, `{}`)
		}
	}
	a.must(http.StatusOK, get, "/healthz", "")
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

// TestOtherOrigins: a page in the operator's browser must not deploy to an API without a password on his machine.
func TestOtherOrigins(t *testing.T) {
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

func TestWhatIsNotThere(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusNotFound, get, "/system/nosuch", "")
	a.must(http.StatusNotFound, get, "/", "")
	a.must(http.StatusMethodNotAllowed, "PATCH", functions, "")
	_, text := a.do(get, "/system/info", "", "X-Forwarded-Host", "gateway.example") // by a gateway
	if info := decodeJSON[types.ProviderInfo](t, text); info.Name != "stagecoach" || info.Version.Release != "v0.1.0" {
		t.Errorf("info %+v", info)
	}
}

func TestDescribeShowsWhatRuns(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"echo","image":"stagecoach/echo:1","annotations":{"a":"b"}}`)
	const key = "echo.openfaas-fn"
	a.fakes.states[key] = State{Replicas: 3, Available: 1, Invocations: 7, Detail: "node n1:\n no model.onnx"}
	a.fakes.usage[key] = Usage{CPUMilli: 250, MemoryBytes: 1 << 20}
	s := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo?usage=1", ""))
	if s.Replicas != 3 || s.AvailableReplicas != 1 || s.InvocationCount != 7 {
		t.Errorf("status %+v", s)
	}
	if s.Usage == nil || *s.Usage != (types.FunctionUsage{CPU: 250, TotalMemoryBytes: 1 << 20}) {
		t.Errorf("usage %+v", s.Usage)
	}
	a.fakes.replicas[key] = []Replica{
		{Name: "echo-a", Node: "n1", State: "ready", Path: "fork", Ready: 8800 * time.Microsecond, Answered: time.Second, Phases: []Phase{
			{"order", 300 * time.Microsecond}, {"fork", 4200 * time.Microsecond}, {"place", 4300 * time.Microsecond}, {"first inference", 7 * time.Millisecond},
		}},
		{Name: "echo-b", Node: "n2", State: "starting", Hidden: true},
	}
	const replicas = "echo-a on n1: ready, fork, ready after 8.8ms (order 300µs, fork 4.2ms, place 4.3ms, first inference 7ms), first answer after 1s; " +
		"echo-b on n2: starting, its node is silent"
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
	// What was described can be deployed again; the answer's own annotation does not stay.
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
	} {
		if text := a.must(http.StatusBadRequest, post, "/system/scale-function/echo", body); !strings.Contains(text, want) {
			t.Errorf("%s: %q, want it to name %q", body, text, want)
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
	a.fakes.states["read.openfaas-fn"] = State{Replicas: 2, Available: 1, Detail: "starting"}
	for _, path := range []string{"ocr", "ocr.openfaas-fn", "ocr?namespace=openfaas-fn"} {
		p = decodeJSON[PipelineStatus](t, a.must(http.StatusOK, get, "/system/pipelines/"+path, ""))
		if !p.Ready || p.Entry != "detect" || len(p.Stages) != 2 || p.SLO != "400ms" {
			t.Fatalf("%s: %+v", path, p)
		}
	}
	if s := p.Stages; s[0].Name != "detect" || s[0].Next[0].To != "read" || s[1].Replicas != 2 || s[1].AvailableReplicas != 1 || s[1].Detail != "starting" {
		t.Errorf("stages %+v", s)
	}
	a.must(http.StatusNotFound, get, "/system/pipelines/nosuch", "")
	a.must(http.StatusNotFound, get, "/system/pipelines/detect", "") // a function
	if g, ok := a.Registry.Graph("ocr.openfaas-fn"); !ok || len(g.Stages) != 2 {
		t.Errorf("graph of the pipeline: %+v, %t", g, ok)
	}
	if g, ok := a.Registry.Graph("detect.openfaas-fn"); !ok || len(g.Stages) != 1 || len(g.Stages[0].Next) != 0 || g.Entry != "detect" || len(g.Faults) != 0 {
		t.Errorf("graph of the function alone: %+v, %t", g, ok)
	}
	if g, ok := a.Registry.Graph("read.openfaas-fn"); !ok || g.Stages[0].Join != 0 {
		t.Errorf("graph of a function alone waits for a predecessor: %+v, %t", g, ok)
	}
	if key, ok := a.Registry.Resolve("ocr"); !ok || key != "ocr.openfaas-fn" {
		t.Errorf("ocr resolves to %q, %t", key, ok)
	}
}

func TestRestart(t *testing.T) {
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
	if len(after) != 1 || after[0].Key != "echo.openfaas-fn" || after[0].Revision != before[0].Revision || !after[0].CreatedAt.Equal(before[0].CreatedAt) {
		t.Errorf("after a restart %+v, want %+v", after, before)
	}
	b.must(http.StatusOK, get, "/system/function/echo", "")
	b.must(http.StatusAccepted, post, functions, `{"service":"future","image":"stagecoach/echo:1"}`) // takes the place of what cannot be read
}

// TestVisible: a deploy is answered when readers and listeners know it, and not before.
func TestVisible(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, newMemoryStore(), nil)
		told, hold := 0, make(chan struct{})
		a.Registry.OnChange(func(Change) {
			if _, ok := a.Registry.Graph("echo.openfaas-fn"); ok {
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

func TestStoreTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, newMemoryStore(), nil)
		const echo = `{"service":"echo","image":"stagecoach/echo:1"}`
		a.store.refuse = errors.New("no space left")
		if text := a.must(http.StatusServiceUnavailable, post, functions, echo); !strings.Contains(text, "no space left") {
			t.Errorf("refused: %q", text)
		}
		a.store.refuse, a.store.silent = nil, true
		if text := a.must(http.StatusServiceUnavailable, post, functions, echo); !strings.Contains(text, "not yet seen") { // after 10 s, which are fake
			t.Errorf("unseen: %q", text)
		}
	})
}

// TestManyAtOnce deploys from many clients while others read; with the race detector it checks that views do not change.
func TestManyAtOnce(t *testing.T) {
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
			if g, ok := a.Registry.Graph(fmt.Sprintf("p%d.openfaas-fn", i)); !ok || g.Entry != name {
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
	if !slices.IsSortedFunc(got, func(x, y *Deployed) int { return strings.Compare(x.Key, y.Key) }) {
		t.Error("functions are not sorted")
	}
}

// TestFunctionBeforePipeline: of the same name, the function is invoked; the pipeline stays to be seen, with its fault.
func TestFunctionBeforePipeline(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"ocr","image":"stagecoach/o:1"}`)
	a.must(http.StatusAccepted, post, functions, `{"service":"read","image":"stagecoach/r:1","annotations":{"stagecoach.dev/pipeline":"ocr"}}`)
	if g, ok := a.Registry.Graph("ocr.openfaas-fn"); !ok || g.Entry != "ocr" || len(g.Faults) != 0 {
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
