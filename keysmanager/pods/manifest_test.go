package pods

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// manifest returns the pod of a command, and the same as text.
func manifest(t *testing.T, c sandbox.Command, o sandbox.Outline) (kube.Pod, string) {
	t.Helper()
	r := &Runtime{cfg: Config{Named: named, Machine: "m", Image: "ours", Init: "/bin/stagecoach-init", PullSecrets: []string{"pull"}, Tolerations: []map[string]any{{"key": "gpu", "operator": "Exists"}}, Labels: map[string]string{sandbox.LabelFunction: "web.fn", sandbox.LabelReplica: "web-abcde"}}, owner: "run"}
	p := r.pod(c, o, "fn")
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return p, string(b)
}

// httpCommand returns a command of a function that speaks HTTP.
func httpCommand() sandbox.Command {
	c := sandbox.Command{Chroot: "/images/web", Argv: []string{"/app/web"}, User: "app"}
	c.Labels = map[string]string{sandbox.LabelImage: "registry/web:1"}
	return c
}

// TestPodOfAnImageHasItsUser checks the pod of an image whose user is not root.
func TestPodOfAnImageHasItsUser(t *testing.T) {
	p, text := manifest(t, httpCommand(), sandbox.Outline{UID: 1000, GID: 3000, Groups: []int{7}})
	main, copies := p.Spec.Containers[0], p.Spec.InitContainers[0]
	for what, got := range map[string]string{
		"image": main.Image, "of the copy": copies.Image,
		"user": fmt.Sprint(main.SecurityContext["runAsUser"], main.SecurityContext["runAsGroup"], main.SecurityContext["runAsNonRoot"], p.Spec.SecurityContext["supplementalGroups"]),
		"root": fmt.Sprint(main.SecurityContext["readOnlyRootFilesystem"]), "escalation": fmt.Sprint(main.SecurityContext["allowPrivilegeEscalation"], copies.SecurityContext["allowPrivilegeEscalation"]),
		"account": fmt.Sprint(*p.Spec.MountAccount, *p.Spec.ServiceLinks), "limits": fmt.Sprint(main.Resources.Limits), "labels": fmt.Sprint(p.Metadata.Labels[LabelFunction], p.Metadata.Labels[LabelReplica], p.Metadata.Labels[labelOwner]),
	} {
		want := map[string]string{
			"image": "registry/web:1", "of the copy": "ours", "user": "1000 3000 true [7]", "root": "<nil>", "escalation": "false false", "account": "false false",
			"limits": "map[]", "labels": "webweb-abcderun",
		}[what]
		if got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	for _, part := range []string{`"imagePullSecrets":[{"name":"pull"}]`, `"tolerations":[{"key":"gpu","operator":"Exists"}]`} {
		if !strings.Contains(text, part) {
			t.Errorf("the pod lacks %s: %s", part, text)
		}
	}
	if strings.Contains(text, `"add":`) || strings.Contains(text, "hostPath") || !main.Mounts[0].ReadOnly {
		t.Errorf("too many rights: %s", text)
	}
}

// TestPodOfARootImage checks that a program with the user root gets the rights that it has in other
// runtimes, less those that its function gives up.
func TestPodOfARootImage(t *testing.T) {
	c := httpCommand()
	c.Options.Drop = []string{"CAP_CHOWN"}
	p, _ := manifest(t, c, sandbox.Outline{})
	rights, ok := p.Spec.Containers[0].SecurityContext["capabilities"].(map[string]any)
	if !ok {
		t.Fatal("no capabilities")
	}
	added, _ := rights["add"].([]string)
	if slices.Contains(added, "CHOWN") || !slices.Contains(added, "SETUID") || slices.Contains(added, "SYS_ADMIN") || slices.Contains(added, "CAP_SETUID") {
		t.Errorf("added rights %q", added)
	}
	if p.Spec.Containers[0].SecurityContext["runAsNonRoot"] != nil {
		t.Error("runAsNonRoot is set")
	}
}

// TestPodHasWhatTheFunctionAsksFor checks secrets, a root that is read-only, and limits.
func TestPodHasWhatTheFunctionAsksFor(t *testing.T) {
	c := httpCommand()
	c.ReadOnly, c.Binds = true, []sandbox.Bind{{From: "/secrets", To: "/var/openfaas/secrets", Copy: true}}
	c.Options.Memory, c.Options.CPUMilli = 64<<20, 500
	p, _ := manifest(t, c, sandbox.Outline{UID: 1})
	main := p.Spec.Containers[0]
	if main.SecurityContext["readOnlyRootFilesystem"] != true {
		t.Error("its root can be written to")
	}
	at := map[string]string{}
	for _, m := range main.Mounts {
		at[m.At] = m.Name
	}
	if len(at) != 3 || at["/tmp"] == "" || at["/var/openfaas/secrets"] == "" {
		t.Errorf("mounts %v", at)
	}
	for _, v := range p.Spec.Volumes {
		if v.Name == at["/var/openfaas/secrets"] && v.Empty["medium"] != "Memory" {
			t.Error("secrets are not in memory")
		}
	}
	want := map[string]string{"memory": fmt.Sprint(96 << 20), "cpu": "500m"}
	if !maps.Equal(main.Resources.Limits, want) || !maps.Equal(main.Resources.Requests, want) {
		t.Errorf("%v, want %v", main.Resources, want)
	}
	if firstRequests["cpu"] != "10m" {
		t.Errorf("the first requests of all pods are %v now", firstRequests)
	}
}
