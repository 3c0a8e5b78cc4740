package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/internal/kubefake"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

type object = kubefake.Object

// logged is a log that tests read while it is written.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func newLogged() *logged { return &logged{} }

// Write implements io.Writer.
func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logged) log() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// await waits until the log has all of these texts.
func (l *logged) await(t *testing.T, texts ...string) {
	t.Helper()
	proctest.Until(t, fmt.Sprintf("%q in the log", texts), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return !slices.ContainsFunc(texts, func(want string) bool { return !strings.Contains(l.text.String(), want) })
	})
}

func client(t *testing.T, s *kubefake.Server) *kube.Client {
	t.Helper()
	c, err := kube.New(s.URL, s.Account)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// copies are copies in memory.
type copies struct {
	mu   sync.Mutex
	by   map[string]string // by namespace/name
	fail error             // of Put
}

// List implements Copies.
func (c *copies) List(namespace string) (names []string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key := range c.by {
		if name, ok := strings.CutPrefix(key, namespace+"/"); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Put implements Copies.
func (c *copies) Put(namespace, name string, value []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return c.fail
	}
	c.by[namespace+"/"+name] = string(value)
	return nil
}

// Delete implements Copies.
func (c *copies) Delete(namespace, name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.by, namespace+"/"+name)
	return nil
}

func (c *copies) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Sprint(c.by)
}

// secretOf returns a Secret with a label, and a value for each key.
func secretOf(managed string, data map[string]string) object {
	in := map[string][]byte{}
	for key, value := range data {
		in[key] = []byte(value)
	}
	return object{"metadata": object{"labels": object{kube.LabelManaged: managed}}, "type": "Opaque", "data": in}
}

// opened opens the secrets of namespace ns.
func opened(t *testing.T, s *kubefake.Server, l *logged) (*Secrets, *copies, chan string) {
	t.Helper()
	c := &copies{by: map[string]string{"ns/old": "deleted while nobody watched"}}
	secrets := OpenSecrets(t.Context(), SecretsConfig{Cluster: client(t, s), Namespaces: []string{"ns", "more"}, Copies: c, Log: l.log()})
	changes := make(chan string, 100)
	t.Cleanup(secrets.Close)
	return secrets, c, changes
}

func follow(s *Secrets, changes chan string) {
	s.Follow(func(namespace, name string) { changes <- namespace + "/" + name })
}

// TestSecretsAreSecrets checks what the API does to Secrets of Kubernetes.
func TestSecretsAreSecrets(t *testing.T) {
	s := kubefake.Start(t)
	s.Put("namespaces/ns/secrets/alien", object{"data": object{"x": "eA=="}})
	s.Put("namespaces/ns/secrets/by-hand", secretOf("openfaas", map[string]string{"any": "1"}))
	s.Put("namespaces/ns/secrets/many", secretOf("openfaas", map[string]string{"a": "1", "b": "2"}))
	l := newLogged()
	secrets, c, _ := opened(t, s, l)
	ctx := t.Context()
	if got := c.String(); got != "map[ns/by-hand:1]" {
		t.Errorf("copies at first: %s", got)
	}
	l.await(t, "functions do not see a Secret of Kubernetes", "ns/many", "it has 2 keys")
	if _, err := secrets.Put(ctx, "ns", "token", []byte("one\x00")); err != nil {
		t.Fatal(err)
	}
	o := s.Get("namespaces/ns/secrets/token")
	if data := o["data"].(object); len(data) != 1 || data["token"] != "b25lAA==" || o["type"] != "Opaque" || fmt.Sprint(o["metadata"].(object)["labels"]) != "map[app.kubernetes.io/managed-by:stagecoach]" {
		t.Errorf("a new secret: %v", o)
	}
	for _, name := range []string{"token", "by-hand"} {
		if _, err := secrets.Put(ctx, "ns", name, []byte("two")); err != nil {
			t.Errorf("update of %s: %v", name, err)
		}
	}
	if data := s.Get("namespaces/ns/secrets/by-hand")["data"].(object); len(data) != 1 || data["any"] != "dHdv" {
		t.Errorf("after an update of a Secret with one other key: %v", data)
	}
	if names, err := secrets.List("ns"); err != nil || !slices.Equal(names, []string{"by-hand", "token"}) || c.String() != "map[ns/by-hand:two ns/token:two]" {
		t.Errorf("secrets %v, %v, copies %v", names, err, c)
	}
	if err := errors.Join(secrets.Delete(ctx, "ns", "by-hand"), secrets.Delete(ctx, "ns", "token"), secrets.Delete(ctx, "ns", "none")); err != nil {
		t.Error(err)
	}
	if c.String() != "map[]" || s.Get("namespaces/ns/secrets/token") != nil || s.Get("namespaces/ns/secrets/by-hand") != nil {
		t.Errorf("after deletions: %v", c)
	}
}

// TestSecretsOfOthersStay checks that Secrets without the label are neither changed nor deleted,
// and which status clients get.
func TestSecretsOfOthersStay(t *testing.T) {
	s := kubefake.Start(t)
	s.Put("namespaces/ns/secrets/alien", object{"data": object{"x": "eA=="}})
	secrets, _, _ := opened(t, s, newLogged())
	_, put := secrets.Put(t.Context(), "ns", "alien", []byte("v"))
	_, nowhere := secrets.Put(t.Context(), "other", "token", []byte("v"))
	for what, err := range map[string]error{"put": put, "delete": secrets.Delete(t.Context(), "ns", "alien")} {
		var refused *Refusal
		if !errors.As(err, &refused) || refused.HTTPStatus() != http.StatusConflict || !strings.Contains(err.Error(), "app.kubernetes.io/managed-by") {
			t.Errorf("%s of a Secret of somebody else: %v", what, err)
		}
	}
	if data := s.Get("namespaces/ns/secrets/alien")["data"].(object); len(data) != 1 || s.Asked("patch", "secrets")+s.Asked("delete", "secrets") > 0 {
		t.Errorf("the Secret of somebody else is %v now", data)
	}
	if nowhere == nil || !strings.Contains(nowhere.Error(), `namespace "other"`) || !strings.Contains(nowhere.Error(), "more, ns") && !strings.Contains(nowhere.Error(), "ns, more") {
		t.Errorf("namespace that is not used: %v", nowhere)
	}
	s.Refuse(func(verb, _ string, _ []byte) (int, string) {
		if verb == "create" {
			return http.StatusUnprocessableEntity, "too long"
		}
		return 0, ""
	})
	_, err := secrets.Put(t.Context(), "ns", "big", []byte("v"))
	var refused *Refusal
	if !errors.As(err, &refused) || refused.Status != http.StatusUnprocessableEntity {
		t.Errorf("a Secret that the API server does not accept: %v", err)
	}
}

// TestSecretsFollow checks that changes by others reach functions, and that an error names the verb
// and the resource.
func TestSecretsFollow(t *testing.T) {
	s := kubefake.Start(t)
	s.Forbid("list", "secrets", true)
	l := newLogged()
	secrets, c, changes := opened(t, s, l)
	l.await(t, "cannot list resource")
	if _, err := secrets.List("ns"); err == nil || !strings.Contains(err.Error(), "list secrets of namespace ns: status 403") {
		t.Errorf("secrets that were never listed: %v", err)
	}
	s.Forbid("list", "secrets", false)
	s.Put("namespaces/more/secrets/x", secretOf("openfaas", map[string]string{"x": "1"}))
	follow(secrets, changes)
	want := func(name string) {
		t.Helper()
		proctest.Until(t, "a change of "+name, func() bool { return len(changes) > 0 })
		if got := <-changes; got != name {
			t.Fatalf("changed %s, want %s", got, name)
		}
	}
	want("more/x")
	s.Put("namespaces/more/secrets/x", secretOf("openfaas", map[string]string{"x": "2"}))
	want("more/x")
	s.Put("namespaces/more/secrets/x", secretOf("someone", map[string]string{"x": "3"}))
	s.Put("namespaces/more/secrets/y", secretOf("openfaas", map[string]string{"y": "1"}))
	want("more/y")
	if got := c.String(); got != "map[more/y:1]" && got != "map[more/y:1 ns/old:deleted while nobody watched]" {
		t.Errorf("copies %s, want y alone", got)
	}
	s.Delete("namespaces/more/secrets/y")
	s.Put("namespaces/more/secrets/z", secretOf("stagecoach", map[string]string{"z": "1"}))
	want("more/z")
	if names, err := secrets.List("more"); err != nil || !slices.Equal(names, []string{"z"}) {
		t.Errorf("secrets %v, %v, want z alone", names, err)
	}
}

// TestNamespacesOptIn checks which namespaces functions may be in.
func TestNamespacesOptIn(t *testing.T) {
	s := kubefake.Start(t)
	l := newLogged()
	n := NewNamespaces([]string{"team", "fn", "away", "plain"}, "fn", l.log())
	t.Cleanup(n.Close)
	if got := fmt.Sprint(n.Names()); got != "[away fn plain team]" {
		t.Errorf("namespaces of a list: %s", got)
	}
	s.Forbid("list", "namespaces", true)
	for name, note := range map[string]object{"team": {"openfaas": "1"}, "plain": {}, "unlisted": {"openfaas": "1"}} {
		s.Put("namespaces/"+name, object{"metadata": object{"annotations": note}})
	}
	n.Follow(client(t, s))
	l.await(t, "cannot list resource")
	if err := n.Admit("team"); err == nil || n.Admit("fn") != nil {
		t.Errorf("while namespaces are not known: team %v, the default one %v", err, n.Admit("fn"))
	}
	s.Forbid("list", "namespaces", false)
	awaitNames(t, n, "[fn team]")
	for name, want := range map[string]string{"plain": "kubectl annotate namespace plain openfaas=1", "away": "no namespace", "unlisted": "--kube-namespaces"} {
		if err := n.Admit(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("namespace %s: %v, want %q", name, err, want)
		}
	}
	s.Put("namespaces/plain", object{"metadata": object{"annotations": object{"openfaas": "true"}}})
	s.Delete("namespaces/team")
	awaitNames(t, n, "[fn plain]")
}

// awaitNames waits until these are the namespaces.
func awaitNames(t *testing.T, n *Namespaces, want string) {
	t.Helper()
	proctest.Until(t, "namespaces "+want, func() bool { return fmt.Sprint(n.Names()) == want })
}

// background is a context that ends with the test, before its cleanups.
func background(t *testing.T, run func(context.Context)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); run(ctx) }()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return stop
}

// TestVerbs checks that the verbs of the chart's Role are those that are used.
func TestVerbs(t *testing.T) {
	s := kubefake.Start(t)
	secrets, _, changes := opened(t, s, newLogged())
	follow(secrets, changes)
	for range 2 {
		if _, err := secrets.Put(t.Context(), "ns", "x", []byte("v")); err != nil {
			t.Fatal(err)
		}
	}
	if err := secrets.Delete(t.Context(), "ns", "x"); err != nil {
		t.Fatal(err)
	}
	d := &deployments{by: map[pipeline.Key]string{f: "v1"}}
	o := derived(t, s, d, newLogged())
	background(t, o.Run)
	for _, text := range []string{"v1", "v2", ""} {
		d.set(f, text)
		o.Deployed(f)
		awaitMap(t, s, text)
	}
	b, err := os.ReadFile("../../charts/stagecoach/templates/functions.yaml")
	if err != nil {
		t.Fatal(err)
	}
	verbs := regexp.MustCompile(`\$verbs := list (.*) }}`).FindSubmatch(b)
	if len(verbs) < 2 {
		t.Fatal("the chart names no verbs")
	}
	chart := strings.Fields(strings.ReplaceAll(string(verbs[1]), `"`, ""))
	for _, resource := range []string{"secrets", "configmaps"} {
		for _, verb := range chart {
			proctest.Until(t, verb+" "+resource, func() bool { return s.Asked(verb, resource) > 0 })
		}
		for _, verb := range []string{"create", "delete", "get", "list", "patch", "watch"} {
			if s.Asked(verb, resource) > 0 != slices.Contains(chart, verb) {
				t.Errorf("verb %s for %s: the chart's Role has %v", verb, resource, chart)
			}
		}
	}
}
