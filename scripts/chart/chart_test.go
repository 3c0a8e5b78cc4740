package chart

import (
	"bytes"
	"encoding/base64"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files again; commit them only if you can say why each line moved")

const dir = "../../charts/stagecoach"

// fixed replaces what is drawn by chance.
func fixed(kind string) string {
	if kind == "randBytes" { // with all characters that a key must not have
		return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("\xfb\xff\xfe\x00"), 8))
	}
	return "RANDOM"
}

func release(name string) Release { return Release{Name: name, Namespace: "faas", Random: fixed} }

// values returns the values of a golden file.
func values(t *testing.T, name string) map[string]any {
	t.Helper()
	v, err := readYAML(filepath.Join("testdata/values", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if name != "production" {
		return v
	}
	production, err := readYAML(filepath.Join(dir, "values-production.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return merge(production, v)
}

// render renders the chart and returns its manifests.
func render(t *testing.T, r Release, v map[string]any) []string {
	t.Helper()
	files, err := Render(dir, r, v)
	if err != nil {
		t.Fatal(err)
	}
	all, err := Manifests(files)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var names = []string{"minimal", "production", "external", "ingress", "pods"}

func TestGolden(t *testing.T) {
	for _, name := range names {
		// y is true in YAML, unless it is quoted.
		got := strings.Join(render(t, release("y"), values(t, name)), "---\n")
		file := filepath.Join("testdata/golden", name+".yaml")
		if *rewrite {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: %s; go test -C scripts/chart . -rewrite writes it again", file, firstDifference(got, string(want)))
		}
	}
}

func firstDifference(got, want string) string {
	a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return "got " + a[i] + ", want " + b[i]
		}
	}
	return "the lengths differ"
}

// object is a manifest with what tests look at.
type object struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Data      map[string]string `json:"data"`
	Immutable bool
	Spec      struct {
		podSpec
		Template struct {
			Spec podSpec `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
	Rules []struct{ Verbs []string } `json:"rules"`
}

type podSpec struct {
	AutomountServiceAccountToken *bool       `json:"automountServiceAccountToken"`
	HostNetwork                  bool        `json:"hostNetwork"`
	HostPID                      bool        `json:"hostPID"`
	SecurityContext              security    `json:"securityContext"`
	InitContainers               []container `json:"initContainers"`
	Containers                   []container `json:"containers"`
	Volumes                      []struct {
		Name     string          `json:"name"`
		HostPath *map[string]any `json:"hostPath"`
		Secret   *struct {
			SecretName string `json:"secretName"`
		} `json:"secret"`
	} `json:"volumes"`
}

type security struct {
	RunAsNonRoot             bool                         `json:"runAsNonRoot"`
	Privileged               bool                         `json:"privileged"`
	AllowPrivilegeEscalation *bool                        `json:"allowPrivilegeEscalation"`
	ReadOnlyRootFilesystem   bool                         `json:"readOnlyRootFilesystem"`
	SeccompProfile           struct{ Type string }        `json:"seccompProfile"`
	Capabilities             struct{ Add, Drop []string } `json:"capabilities"`
}

type container struct {
	Name            string   `json:"name"`
	Args            []string `json:"args"`
	SecurityContext security `json:"securityContext"`
	Resources       struct {
		Requests map[string]any `json:"requests"`
	} `json:"resources"`
	LivenessProbe, ReadinessProbe, StartupProbe any
	VolumeMounts                                []struct{ Name string } `json:"volumeMounts"`
}

// objects parses manifests.
func objects(t *testing.T, manifests []string) []object {
	t.Helper()
	var all []object
	seen := map[string]bool{}
	for _, m := range manifests {
		var o object
		if err := yaml.Unmarshal([]byte(m), &o); err != nil {
			t.Fatalf("%v\n%s", err, m)
		}
		if o.Metadata.Labels["app.kubernetes.io/instance"] != "y" {
			t.Errorf("%s %s lacks the label of its release: %v", o.Kind, o.Metadata.Name, o.Metadata.Labels)
		}
		// y is true in YAML, unless it is quoted.
		if !strings.HasPrefix(o.Metadata.Name, "y") && !slices.Contains([]string{"gateway", "basic-auth", "stagecoach:faas:y"}, o.Metadata.Name) {
			t.Errorf("%s %s: want a name that begins with that of the release", o.Kind, o.Metadata.Name)
		}
		if key := o.Kind + " " + o.Metadata.Namespace + "/" + o.Metadata.Name; seen[key] {
			t.Errorf("%s is there twice", key)
		} else {
			seen[key] = true
		}
		all = append(all, o)
	}
	return all
}

// pods returns the specs of pods by their objects' kinds and names.
func pods(all []object) map[string]podSpec {
	out := map[string]podSpec{}
	for _, o := range all {
		switch o.Kind {
		case "StatefulSet", "DaemonSet", "Deployment", "Job":
			out[o.Kind+" "+o.Metadata.Name] = o.Spec.Template.Spec
		case "Pod":
			out[o.Kind+" "+o.Metadata.Name] = o.Spec.podSpec
		}
	}
	return out
}

// TestPodSecurity checks that all pods keep to Pod Security "restricted", but those of the
// DaemonSet, and that these have no more rights than the documentation lists.
func TestPodSecurity(t *testing.T) {
	doc, err := os.ReadFile("../../docs/howto-kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		all := pods(objects(t, render(t, release("y"), values(t, name))))
		if len(all) < 3 {
			t.Errorf("%s: pods of %v, want at least three kinds", name, slices.Sorted(maps.Keys(all)))
		}
		for of, p := range all {
			for _, c := range append(p.InitContainers, p.Containers...) {
				if len(c.Resources.Requests) == 0 || !c.SecurityContext.ReadOnlyRootFilesystem || c.SecurityContext.Privileged || p.HostNetwork || p.HostPID && (name != "pods" || of != "DaemonSet y-keysmanager") {
					t.Errorf("%s: container %s of %s: %+v, want requests, a read-only root, and neither privileges nor namespaces of the machine", name, c.Name, of, c)
				}
				if of == "DaemonSet y-keysmanager" {
					checkCapabilities(t, c.SecurityContext.Capabilities.Add, string(doc), name == "pods")
				} else if s := c.SecurityContext; !p.SecurityContext.RunAsNonRoot || p.SecurityContext.SeccompProfile.Type != "RuntimeDefault" ||
					s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || len(s.Capabilities.Add) > 0 {
					t.Errorf("%s: container %s of %s does not keep to Pod Security restricted: %+v, pod %+v", name, c.Name, of, s, p.SecurityContext)
				}
			}
			for _, v := range p.Volumes {
				if v.HostPath != nil && of != "DaemonSet y-keysmanager" {
					t.Errorf("%s: %s mounts a folder of the machine: %s", name, of, v.Name)
				}
			}
		}
	}
}

// checkCapabilities compares capabilities with those in the table of the documentation.
func checkCapabilities(t *testing.T, have []string, doc string, pods bool) {
	t.Helper()
	var listed []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|").FindAllStringSubmatch(doc, -1) {
		listed = append(listed, m[1])
	}
	slices.Sort(listed)
	if !pods { // the only one that depends on the values
		listed = slices.DeleteFunc(listed, func(name string) bool { return name == "SYS_PTRACE" })
	}
	if !slices.Equal(have, listed) {
		t.Errorf("capabilities of the DaemonSet: %v; docs/howto-kubernetes.md lists %v", have, listed)
	}
}

// TestClusterKeyStaysWithControlPlanes checks which containers have the cluster key, and which pods
// have credentials for the API server.
func TestClusterKeyStaysWithControlPlanes(t *testing.T) {
	all := objects(t, render(t, release("y"), values(t, "minimal")))
	for of, p := range pods(all) {
		volume := ""
		for _, v := range p.Volumes {
			if v.Secret != nil && v.Secret.SecretName == "y-cluster-key" {
				volume = v.Name
			}
		}
		for _, c := range append(p.InitContainers, p.Containers...) {
			may := of == "StatefulSet y-control" || of == "StatefulSet y-nats" && c.Name == "files"
			has := slices.ContainsFunc(c.VolumeMounts, func(m struct{ Name string }) bool { return m.Name == volume })
			if has != may {
				t.Errorf("container %s of %s has the cluster key: %v, want %v", c.Name, of, has, may)
			}
		}
		if account := p.AutomountServiceAccountToken; account == nil || *account != (of == "StatefulSet y-control") {
			t.Errorf("%s: credentials for the API server: %v, want them for control planes alone", of, account)
		}
	}
	for _, o := range all {
		for _, r := range o.Rules {
			want := []string{"get", "patch"} // of the Secret with the join token
			if o.Kind == "ClusterRole" {
				want = []string{"list", "watch"} // of machines
			}
			if !slices.Equal(r.Verbs, want) {
				t.Errorf("%s %s: verbs %v, want %v", o.Kind, o.Metadata.Name, r.Verbs, want)
			}
		}
	}
}

// TestSecretsAreMadeOnce checks new Secrets, and that an upgrade keeps those that the cluster has.
func TestSecretsAreMadeOnce(t *testing.T) {
	secrets := func(r Release) map[string]map[string]string {
		out := map[string]map[string]string{}
		for _, o := range objects(t, render(t, r, values(t, "minimal"))) {
			if o.Kind == "Secret" {
				out[o.Metadata.Name] = o.Data
			}
		}
		return out
	}
	r := Release{Name: "y", Namespace: "faas"}
	first, second := secrets(r), secrets(r)
	if len(first) != 3 || len(first["y-join"]) != 0 {
		t.Errorf("secrets %v, want the cluster's key, the credentials, and an empty join token", first)
	}
	for _, of := range [][2]string{{"y-cluster-key", "cluster.key"}, {"basic-auth", "basic-auth-password"}} {
		if a, b := first[of[0]][of[1]], second[of[0]][of[1]]; a == "" || a == b {
			t.Errorf("%s of two installations: %q and %q, want two values", of[1], a, b)
		}
	}
	key, err := base64.StdEncoding.DecodeString(first["y-cluster-key"]["cluster.key"])
	if err != nil || !regexp.MustCompile(`^stagecoach-cluster-1\.[A-Za-z0-9_-]{43}\n$`).Match(key) {
		t.Errorf("cluster key %q, %v", key, err)
	}
	r.Secrets = map[string]any{
		"y-cluster-key": map[string]any{"cluster.key": "a2V5"},
		"basic-auth":    map[string]any{"basic-auth-user": "bWU=", "basic-auth-password": "cHc="},
	}
	kept := secrets(r)
	if kept["y-cluster-key"]["cluster.key"] != "a2V5" || kept["basic-auth"]["basic-auth-user"] != "bWU=" || kept["basic-auth"]["basic-auth-password"] != "cHc=" {
		t.Errorf("secrets after an upgrade: %v, want those of the cluster", kept)
	}
}

// TestBadValues checks that the schema names each wrong value.
func TestBadValues(t *testing.T) {
	for text, want := range map[string]string{
		"{gatway: {replicas: 1}}":                                      "gatway",
		"{gateway: {replica: 3}}":                                      "replica",
		"{gateway: {replicas: 4}}":                                     "/gateway/replicas",
		"{gateway: {replicas: '2'}}":                                   "/gateway/replicas",
		"{gateway: {upstreamTimeout: 65}}":                             "/gateway/upstreamTimeout",
		"{nats: {replicas: 2}}":                                        "/nats/replicas",
		"{nats: {external: {enabled: true, urls: []}}}":                "/nats/external/urls",
		"{nats: {external: {enabled: true, urls: ['nats://a:4222']}}}": "/cluster/existingSecret",
		"{functionNamespace: mine}":                                    "/functionNamespace",
		"{basic_auth: false}":                                          "/basic_auth",
		"{image: {digest: latest}}":                                    "/image/digest",
		"{keysManager: {hostPath: relative}}":                          "/keysManager/hostPath",
		"{keysManager: {privileged: true}}":                            "privileged",
		"{ingress: {hosts: [{path: /}]}}":                              "/ingress/hosts/0",
		"{networkPolicy: {enabled: 'yes'}}":                            "/networkPolicy/enabled",
		"{serviceType: Nodeport}":                                      "/serviceType",
		"{dataPolicy: forget}":                                         "/dataPolicy",
		"{gateway: {resources: {request: {cpu: 1}}}}":                  "request",
		"{keysManager: {drain: 10m}}":                                  "keysManager.drain: 10m: set keysManager.terminationGracePeriodSeconds to at least 621, it is 120",
		"{gateway: {config: {control: {drainTimeout: 1m0.5s}}}}":       "control.drainTimeout: 1m0.5s: set gateway.terminationGracePeriodSeconds to at least 142, it is 90",
		"{gateway: {config: {requests: {timeout: 5m}}}}":               "gateway.upstreamTimeout",
		"{gateway: {config: {registry: {insecure: [a]}}}}":             "the value registry.insecure",
		"{keysManager: {terminationGracePeriodSeconds: 2m}}":           "/keysManager/terminationGracePeriodSeconds",
		"{networkPolicy: {enabled: true, gatewayFrom: [{podSelector: {}}]}, serviceMonitor: {enabled: true}}": "networkPolicy.metricsFrom",
	} {
		var v map[string]any
		if err := yaml.Unmarshal([]byte(text), &v); err != nil {
			t.Fatal(err)
		}
		_, err := Render(dir, release("y"), merge(values(t, "minimal"), v))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", text, err, want)
		}
	}
	if _, err := Render(dir, release("y"), nil); err == nil || !strings.Contains(err.Error(), "image.repository") {
		t.Errorf("without an image: %v, want an error that names image.repository", err)
	}
}

// TestReleaseNames checks that a name is refused from which Kubernetes makes no pods.
func TestReleaseNames(t *testing.T) {
	for name, want := range map[string]bool{"y": true, "my-release-2": true, strings.Repeat("a", 44): true, strings.Repeat("a", 45): false, "a.b": false, "1a": false, "a-": false} {
		_, err := Render(dir, release(name), values(t, "minimal"))
		if (err == nil) != want || err != nil && !strings.Contains(err.Error(), "release name") {
			t.Errorf("%q: %v, want it accepted: %t", name, err, want)
		}
	}
}

// TestServersKeepTheirNumber checks that an upgrade does not change the number of NATS servers.
func TestServersKeepTheirNumber(t *testing.T) {
	for have, want := range map[int]bool{1: true, 3: false} {
		r := release("y")
		r.Replicas = map[string]int{"y-nats": have}
		_, err := Render(dir, r, values(t, "minimal"))
		if (err == nil) != want || err != nil && !strings.Contains(err.Error(), "nats.replicas") {
			t.Errorf("%d servers, and 1 is asked for: %v, want it accepted: %t", have, err, want)
		}
	}
}

// TestKeyIsImmutable checks that a tool that renders the chart without the cluster cannot replace
// the cluster key.
func TestKeyIsImmutable(t *testing.T) {
	for _, o := range objects(t, render(t, release("y"), values(t, "minimal"))) {
		if o.Kind == "Secret" && o.Immutable != (o.Metadata.Name == "y-cluster-key") {
			t.Errorf("secret %s: immutable %t", o.Metadata.Name, o.Immutable)
		}
	}
}

// TestSchemaHasEveryValue checks that the schema refuses unknown keys at each place where
// values.yaml has keys.
func TestSchemaHasEveryValue(t *testing.T) {
	defaults, err := readYAML(filepath.Join(dir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var walk func(path []string, v map[string]any)
	walk = func(path []string, v map[string]any) {
		if len(v) == 0 { // free, such as a nodeSelector
			return
		}
		bad := map[string]any{"unknownKey": true}
		for _, k := range slices.Backward(path) {
			bad = map[string]any{k: bad}
		}
		if slices.Contains([]string{"requests", "limits"}, path[max(len(path)-1, 0):][0]) {
			return // names of resources
		}
		if _, err := Render(dir, release("y"), merge(values(t, "minimal"), bad)); err == nil {
			t.Errorf("values: an unknown key is accepted in %s", strings.Join(path, "."))
		}
		for k, child := range v {
			if c, ok := child.(map[string]any); ok {
				walk(append(slices.Clone(path), k), c)
			}
		}
	}
	for k, child := range defaults {
		if c, ok := child.(map[string]any); ok {
			walk([]string{k}, c)
		}
	}
	if _, err := Render(dir, release("y"), merge(values(t, "minimal"), map[string]any{"unknownKey": 1})); err == nil {
		t.Error("values: an unknown key is accepted at the top")
	}
}

// TestAlertsUseOurMetrics compares the metrics of alerts with those of the documentation.
func TestAlertsUseOurMetrics(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(render(t, release("y"), values(t, "production")), "\n")
	found := regexp.MustCompile(`stagecoach_[a-z_]+`).FindAllString(all, -1)
	if len(found) < 5 {
		t.Errorf("alerts use the metrics %v, want at least five", found)
	}
	for _, m := range found {
		if !strings.Contains(string(doc), "`"+m+"`") {
			t.Errorf("an alert uses %s, which docs/metrics.md does not have", m)
		}
	}
}

// TestValuesAreDocumented checks that docs/howto-kubernetes.md lists the values.
func TestValuesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/howto-kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	defaults, err := readYAML(filepath.Join(dir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range defaults {
		children, ok := v.(map[string]any)
		if !ok || len(children) == 0 {
			children = map[string]any{"": nil}
		}
		for c := range children {
			path := strings.TrimSuffix(k+"."+c, ".")
			if !strings.Contains(string(doc), "`"+path+"`") {
				t.Errorf("docs/howto-kubernetes.md does not name the value %s", path)
			}
		}
	}
}
