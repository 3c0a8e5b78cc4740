package kube

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kubefake"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// faked returns an API server and a client for it.
func faked(t *testing.T) (*kubefake.Server, *Client) {
	t.Helper()
	s := kubefake.Start(t)
	c, err := New(s.URL, s.Account)
	if err != nil {
		t.Fatal(err)
	}
	c.pause = time.Millisecond
	return s, c
}

func labelled(value string) kubefake.Object {
	return kubefake.Object{"metadata": kubefake.Object{"labels": kubefake.Object{"a": value}}, "data": kubefake.Object{"x": "eA=="}}
}

// TestFollow checks what a follower gets: all objects that are selected, each change, and all
// objects again after the server has forgotten the changes, or after an error.
func TestFollow(t *testing.T) {
	s, c := faked(t)
	s.Put("namespaces/ns/secrets/one", labelled("b"))
	s.Put("namespaces/ns/secrets/two", labelled("other"))
	s.Put("namespaces/else/secrets/three", labelled("b"))
	got := make(chan string, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.Follow(ctx, Objects{"secrets", "ns", "a=b"}, Follower{
			Listed: func(_ context.Context, all []Meta) error {
				var names []string
				for _, m := range all {
					names = append(names, m.Name)
				}
				got <- "listed " + strings.Join(names, " ")
				return nil
			},
			Changed: func(_ context.Context, m Meta, gone bool) error {
				got <- fmt.Sprint(m.Name, " gone: ", gone, " a=", m.Labels["a"])
				return nil
			},
			Failed: func(err error) { got <- err.Error() },
		})
	}()
	want := func(text string) {
		t.Helper()
		proctest.Until(t, text, func() bool { return len(got) > 0 })
		if is := <-got; !strings.Contains(is, text) {
			t.Fatalf("the follower got %q, want %q", is, text)
		}
	}
	want("listed one")
	s.Put("namespaces/ns/secrets/four", labelled("b"))
	want("four gone: false a=b")
	s.Put("namespaces/ns/secrets/one", labelled("other"))
	want("one gone: true")
	s.Delete("namespaces/ns/secrets/four")
	want("four gone: true")
	s.Forbid("watch", "secrets", true)
	s.Forget()
	want("listed ")
	want(`kube: watch secrets of namespace ns: status 403: secrets is forbidden: User "test" cannot watch resource "secrets"`)
	s.Put("namespaces/ns/secrets/five", labelled("b"))
	later := func(text string) { // after lists that came before
		t.Helper()
		proctest.Until(t, text, func() bool { return len(got) > 0 && strings.Contains(<-got, text) })
	}
	later("listed five")
	s.Forbid("watch", "secrets", false)
	s.Delete("namespaces/ns/secrets/five")
	s.Put("namespaces/ns/secrets/six", labelled("b"))
	later("six")
	cancel()
	<-ended
}

func TestObjects(t *testing.T) {
	s, c := faked(t)
	ctx := t.Context()
	m, err := c.CreateConfigMap(ctx, ConfigMap{Metadata: Meta{Name: "f", Namespace: "ns", Labels: map[string]string{"a": "b"}}, Data: map[string]string{"x": "1", "y": "2"}})
	if err != nil || m.Metadata.UID == "" {
		t.Fatalf("created %+v, %v", m, err)
	}
	if _, err := c.CreateConfigMap(ctx, m); !Conflict(err) {
		t.Errorf("created twice: %v, want a conflict", err)
	}
	if err := c.PatchConfigMap(ctx, "ns", "f", map[string]any{"data": map[string]any{"x": nil, "y": "3"}}); err != nil {
		t.Fatal(err)
	}
	is, err := c.ConfigMap(ctx, "ns", "f")
	if err != nil || len(is.Data) != 1 || is.Data["y"] != "3" || is.Metadata.UID != m.Metadata.UID {
		t.Errorf("after a patch: %+v, %v", is, err)
	}
	if err := c.DeleteConfigMap(ctx, "ns", "f", "another"); !Conflict(err) {
		t.Errorf("deletion of another object: %v, want a conflict", err)
	}
	if err := c.DeleteConfigMap(ctx, "ns", "f", m.Metadata.UID); err != nil || s.Get("namespaces/ns/configmaps/f") != nil {
		t.Errorf("deletion: %v", err)
	}
	if err := c.DeleteConfigMap(ctx, "ns", "f", m.Metadata.UID); err != nil {
		t.Errorf("deletion of what is gone: %v", err)
	}
	if _, err := c.ConfigMap(ctx, "ns", "f"); !NotFound(err) {
		t.Errorf("what is gone: %v, want not found", err)
	}
}
