package kubetest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// web is a function that speaks HTTP on port 8080. Its path says what it does.
const web = `package main

import ("fmt"; "io"; "net/http"; "os"; "time")

func main() {
	tell := func(what string, err error) string {
		if err != nil { return what + " fails\n" }
		return what + " works\n"
	}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Println("web got", string(b))
		host, _ := os.Hostname()
		fmt.Fprintf(w, "%s from %s", b, host)
	})
	http.HandleFunc("/slow", func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Second)
		fmt.Fprint(w, "done")
	})
	http.HandleFunc("/inside", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "user %d %d home %s\n", os.Getuid(), os.Getgid(), os.Getenv("HOME"))
		b, err := os.ReadFile("/var/openfaas/secrets/pods-secret")
		fmt.Fprintf(w, "secret %q %v\n", b, err)
		fmt.Fprint(w, tell("more secrets", os.WriteFile("/var/openfaas/secrets/more", b, 0600)))
		fmt.Fprint(w, tell("write /tmp", os.WriteFile("/tmp/file", b, 0600)))
		fmt.Fprint(w, tell("write /app", os.WriteFile("/app/file", b, 0600)))
		_, err = os.Stat("/var/run/secrets/kubernetes.io")
		fmt.Fprint(w, tell("account", err))
		_, err = os.ReadDir("/proc/1/fd")
		fmt.Fprint(w, tell("first program", err))
		fmt.Fprintf(w, "api %q\n", os.Getenv("KUBERNETES_SERVICE_HOST"))
	})
	http.ListenAndServe(":8080", nil)
}
`

// webInside is what web has to see from inside.
const webInside = `user 1000 3000 home /app
secret "tops" <nil>
more secrets fails
write /tmp works
write /app fails
account fails
first program fails
api ""
`

// builds writes and builds a static program, and returns its path.
func (i *installed) builds(t *testing.T, name, text string) string {
	t.Helper()
	source := filepath.Join(i.dir, name+".go")
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return program(t, i.dir, name, source)
}

// podOf returns the name of a function's pod.
func (i *installed) podOf(function string) string {
	return strings.TrimSpace(i.Kubectl("get", "pods", "-n", "openfaas-fn", "-l", "faas_function="+function, "--field-selector=status.phase=Running", "-o", "jsonpath={.items[*].metadata.name}"))
}

// testHTTP runs functions that speak HTTP in pods of their own: one with a server, and one with a
// process per request.
func (i *installed) testHTTP(t *testing.T) {
	t.Helper()
	lists := filepath.Join(i.dir, "passwd")
	if err := os.WriteFile(lists, []byte("app:x:1000:3000::/app:/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	webImage := i.image("web:1", map[string]string{"/app/web": i.builds(t, "web", web), "/etc/passwd": lists}, v1.Config{Entrypoint: []string{"/app/web"}, User: "app"})
	upperImage := i.image("upper:2", map[string]string{"/upper": filepath.Join(i.dir, "upper")}, v1.Config{Entrypoint: []string{"/upper"}, User: "1001"})
	rootImage := i.Registry + "/upper:1"
	stack := filepath.Join(i.dir, "http.yml")
	text := fmt.Sprintf(`version: 1.0
provider: {name: openfaas}
functions:
  web: {image: %q, secrets: [pods-secret], readonly_root_filesystem: true, labels: {com.openfaas.scale.min: "2"}, limits: {memory: 64Mi, cpu: 500m}}
  classic: {image: %q, fprocess: /upper}
`, webImage, upperImage)
	if err := os.WriteFile(stack, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	i.stagecoach("secret", "create", "pods-secret", "--from-literal", "tops")
	i.stagecoach("deploy", "-f", stack, "--wait")
	i.Took("deploy functions that speak HTTP")
	if got := i.ask("web/inside", ""); got != "200 "+webInside+"<nil>" {
		t.Errorf("inside, web sees\n%s\nwant\n%s", got, webInside)
	}
	for range 3 {
		if got := i.ask("classic", "hello"); got != "200 HELLO<nil>" {
			t.Errorf("classic answers %q", got)
		}
	}
	_ = rootImage
	t.Log(i.ask("web", "words"))
	t.Log(i.Kubectl("get", "pods", "-n", "openfaas-fn", "-o", "wide"))
	t.Log(i.podOf("web"))
}
