package chart

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// role is a Role or ClusterRole.
type role struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Rules []struct {
		Resources []string `json:"resources"`
		Verbs     []string `json:"verbs"`
	} `json:"rules"`
}

// rolesWith returns the rights that a release has with some values, as KIND NAMESPACE/NAME: rules.
func rolesWith(t *testing.T, text string) (out []string, control string) {
	t.Helper()
	var v map[string]any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	for _, m := range render(t, release("y"), merge(values(t, "minimal"), v)) {
		var r role
		if err := yaml.Unmarshal([]byte(m), &r); err != nil {
			t.Fatal(err)
		}
		if r.Kind == "StatefulSet" && r.Metadata.Name == "y-control" {
			control = m
		}
		if !strings.HasSuffix(r.Kind, "Role") || r.Metadata.Name == "y-control" || r.Metadata.Name == "stagecoach:faas:y" {
			continue
		}
		rules := ""
		for _, rule := range r.Rules {
			rules += fmt.Sprintf(" %v%v", rule.Resources, rule.Verbs)
		}
		out = append(out, r.Kind+" "+r.Metadata.Namespace+"/"+r.Metadata.Name+":"+rules)
	}
	slices.Sort(out)
	return out, control
}

// TestRightsForFunctions checks which rights a release has for objects of functions, and that its
// control planes use these objects.
func TestRightsForFunctions(t *testing.T) {
	const all = "[create delete get list patch watch]"
	for text, want := range map[string]struct {
		roles, args []string
	}{
		"{}": {},
		"{kubernetes: {secrets: true}}": {
			[]string{"Role openfaas-fn/y-faas-functions: [secrets]" + all},
			[]string{"--kube-namespaces=openfaas-fn", "--kube-secrets", "medium: Memory"},
		},
		"{kubernetes: {optIn: true}}": {
			[]string{"ClusterRole /stagecoach:faas:y:namespaces: [namespaces][list watch]"},
			[]string{"--kube-namespaces=openfaas-fn", "--kube-opt-in"},
		},
		"{keysManager: {runtime: pod, podNamespaces: [openfaas-fn, team-a]}}": {
			[]string{
				"Role openfaas-fn/y-faas-functions: [secrets]" + all + " [configmaps]" + all,
				"Role openfaas-fn/y-keysmanager: [pods][create delete get list] [pods/resize][patch] [configmaps][get]",
				"Role team-a/y-faas-functions: [secrets]" + all + " [configmaps]" + all,
				"Role team-a/y-keysmanager: [pods][create delete get list] [pods/resize][patch] [configmaps][get]",
			},
			[]string{"--kube-namespaces=openfaas-fn,team-a", "--kube-secrets", "--kube-objects", "medium: Memory"},
		},
	} {
		roles, control := rolesWith(t, text)
		if !slices.Equal(roles, want.roles) {
			t.Errorf("%s: rights\n%s\nwant\n%s", text, strings.Join(roles, "\n"), strings.Join(want.roles, "\n"))
		}
		for _, arg := range []string{"--kube-namespaces=openfaas-fn,team-a", "--kube-namespaces=openfaas-fn\n", "--kube-secrets", "--kube-objects", "--kube-opt-in", "medium: Memory"} {
			wanted := slices.Contains(want.args, strings.TrimSpace(arg))
			if strings.Contains(control, arg) != wanted {
				t.Errorf("%s: control planes have %q: %v, want %v", text, arg, !wanted, wanted)
			}
		}
	}
}

// TestFunctionNamespaceIsListed checks that the default namespace is among those with rights.
func TestFunctionNamespaceIsListed(t *testing.T) {
	var v map[string]any
	if err := yaml.Unmarshal([]byte("{keysManager: {runtime: pod, podNamespaces: [team-a]}}"), &v); err != nil {
		t.Fatal(err)
	}
	_, err := Render(dir, release("y"), merge(values(t, "minimal"), v))
	if err == nil || !strings.Contains(err.Error(), "keysManager.podNamespaces: want functionNamespace (openfaas-fn) too") {
		t.Errorf("podNamespaces without functionNamespace: %v", err)
	}
}
