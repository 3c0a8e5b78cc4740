package kubetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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
	http.HandleFunc("/exit", func(http.ResponseWriter, *http.Request) { os.Exit(3) })
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

// deploys deploys functions of a stack file.
func (i *installed) deploys(t *testing.T, functions string, more ...string) {
	t.Helper()
	stack := filepath.Join(i.dir, "http.yml")
	if err := os.WriteFile(stack, []byte("version: 1.0\nprovider: {name: openfaas}\nfunctions:\n"+functions), 0o600); err != nil {
		t.Fatal(err)
	}
	i.stagecoach(append([]string{"deploy", "-f", stack}, more...)...)
}

// podsOf returns the names of a function's pods.
func (i *installed) podsOf(function string) []string {
	return strings.Fields(i.Kubectl("get", "pods", "-n", "openfaas-fn", "-l", "faas_function="+function, "-o", "jsonpath={.items[*].metadata.name}"))
}

// speaksHTTP runs functions that speak HTTP in pods of their own: one with a server, and one with a
// process per request.
func (i *installed) speaksHTTP(t *testing.T) {
	in := *i
	in.Cluster = i.In(t)
	i = &in
	lists := filepath.Join(i.dir, "passwd")
	if err := os.WriteFile(lists, []byte("app:x:1000:3000::/app:/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	webImage := i.image("web:1", map[string]string{"/app/web": i.builds(t, "web", web), "/etc/passwd": lists}, v1.Config{Entrypoint: []string{"/app/web"}, User: "app"})
	upperImage := i.image("upper:2", map[string]string{"/upper": filepath.Join(i.dir, "upper")}, v1.Config{Entrypoint: []string{"/upper"}, User: "1001"})
	i.stagecoach("secret", "create", "pods-secret", "--from-literal", "tops")
	i.deploys(t, fmt.Sprintf(`  web: {image: %q, secrets: [pods-secret], readonly_root_filesystem: true, labels: {com.openfaas.scale.min: "2"}, limits: {memory: 64Mi, cpu: 500m}}
  classic: {image: %q, fprocess: /upper}
`, webImage, upperImage), "--wait")
	i.Took("deploy functions that speak HTTP")
	if got := i.ask("web/inside", ""); got != "200 "+webInside+"<nil>" {
		t.Errorf("inside, web sees\n%s\nwant\n%s", got, webInside)
	}
	limits := i.Kubectl("get", "pods", "-n", "openfaas-fn", "-l", "faas_function=web", "-o", "jsonpath={.items[*].spec.containers[0].resources.limits}")
	if want := fmt.Sprintf(`{"cpu":"500m","memory":"%d"}`, 96<<20); limits != want+" "+want {
		t.Errorf("limits %s, want %s of each pod", limits, want)
	}
	begin := time.Now()
	for range 20 {
		if got := i.ask("classic", "hello"); got != "200 HELLO<nil>" {
			t.Errorf("classic answers %q", got)
		}
	}
	t.Log("a call with a process of its own: ", time.Since(begin)/20)
	i.Took("calls")
	i.logsOf(t, "web", "web got words", func() { i.ask("web", "words") })
	i.logsOf(t, "classic", "upper has read hello", func() { i.ask("classic", "hello") })
	i.Took("kubectl logs")
	i.endPods(t)
	i.deploys(t, fmt.Sprintf("  rooted: {image: %q, fprocess: /upper}\n", i.Registry+"/upper:1"))
	i.Await("the refusal of an image whose user is root", func() (string, bool) {
		text := i.stagecoach("describe", "rooted")
		return text, strings.Contains(text, "want a USER in the image")
	})
	i.Took("refusal of root")
	i.stagecoach("remove", "web", "classic", "rooted")
	i.Await("no pod to be left", func() (string, bool) {
		left := i.Kubectl("get", "pods", "-n", "openfaas-fn", "-l", "faas_function in (web,classic,rooted)", "-o", "wide")
		return left, left == ""
	})
	i.Took("remove")
}

// logsOf calls a function until the logs of its pods have a line.
func (i *installed) logsOf(t *testing.T, function, line string, call func()) {
	t.Helper()
	i.Await("a line in kubectl logs of "+function, func() (string, bool) {
		call()
		text := i.Kubectl("logs", "-n", "openfaas-fn", "-l", "faas_function="+function, "--tail=-1")
		return text, strings.Contains(text, line+"\n")
	})
}

// endPods ends pods of functions under calls. The functions answer again, and no ended pod is left.
func (i *installed) endPods(t *testing.T) {
	t.Helper()
	var calls sync.WaitGroup
	defer calls.Wait()
	answers := make(chan string, 100)
	for range 4 {
		calls.Go(func() {
			for range 5 {
				answers <- i.ask("web/slow", "")
			}
		})
	}
	old := i.podsOf("web")
	i.Kubectl("delete", "pod", "-n", "openfaas-fn", old[0], i.podsOf("classic")[0], "--now")
	i.Await("classic to answer again", func() (string, bool) { got := i.ask("classic", "hello"); return got, got == "200 HELLO<nil>" })
	i.ask("web/exit", "") // which ends the program of one pod
	i.Await("two other pods of web", func() (string, bool) {
		now := i.podsOf("web")
		return fmt.Sprintf("%v, before %v", now, old), len(now) == 2 && !slices.Contains(now, old[0])
	})
	i.AwaitPods("openfaas-fn", "faas_function=web", 2)
	calls.Wait()
	close(answers)
	count := map[string]int{}
	for a := range answers {
		count[a]++
	}
	t.Log("answers while pods ended: ", count)
	if count["200 done<nil>"] == 0 {
		t.Error("no call was answered")
	}
	i.Took("ends of pods")
}
