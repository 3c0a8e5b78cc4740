// Package kubetest starts a real Kubernetes for a test: etcd, an API server, a controller manager,
// a scheduler, and nodes with kubelet, containerd and kube-proxy. Each node has a network, mounts
// and process ids of its own. CoreDNS resolves the names of Services. A registry in the test's
// process has the images. Everything ends with the test, even if the test is killed.
package kubetest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

const (
	dnsIP     = "10.96.0.10"
	apiPort   = "6443"
	serviceIP = "10.96.0.0/16"
)

// Options say what a cluster has.
type Options struct {
	Nodes int // real nodes
	Fake  int // nodes without processes, on which each pod counts as running
}

// Cluster is a running Kubernetes. Its methods are for one goroutine.
type Cluster struct {
	Nodes      []*Node
	Kubeconfig string // a path; its user may do everything
	Server     string // the API server's URL, as nodes and pods see it
	Registry   string // host:port, as pods name it

	t       testing.TB
	bin     string
	dir     string
	cgroups string
	net     *netnstest.Net
	control *process
	begun   time.Time
}

// Start makes a cluster whose nodes are Ready. If the machine lacks something, such as root or the
// programs, it skips the test, or fails it if CI=true.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	bin, why := Programs()
	if why != "" {
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	network, machines := netnstest.New(t, o.Nodes)
	dir := newFolder(t)
	c := &Cluster{
		t: t, bin: bin, dir: dir, net: network, cgroups: filepath.Base(dir), begun: time.Now(),
		Kubeconfig: filepath.Join(dir, "kubeconfig"), Server: "https://" + net.JoinHostPort(network.Clients.IP, apiPort),
	}
	c.serveImages()
	c.startControl(len(machines))
	c.Took("control plane")
	for i, m := range machines {
		c.Nodes = append(c.Nodes, c.startNode(i, m))
	}
	c.Await(fmt.Sprintf("%d nodes to be Ready", o.Nodes), func() (string, bool) {
		out := c.list("nodes", `{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
		return out, strings.Count(out, " True") == o.Nodes
	})
	c.Took("nodes")
	if o.Nodes > 0 {
		c.startDNS()
		c.Took("DNS")
	}
	if o.Fake > 0 {
		c.startFake(o.Fake)
		c.Took("fake nodes")
	}
	return c
}

// Programs returns the folder of Kubernetes' programs, and why a cluster cannot run here, if so.
func Programs() (dir, why string) {
	_, here, _, _ := runtime.Caller(0)
	out, err := exec.Command(filepath.Join(filepath.Dir(here), "..", "..", "scripts", "kubernetes", "build"), "--dir").Output()
	if err != nil {
		return "", "the folder of Kubernetes' programs: " + err.Error()
	}
	dir = strings.TrimSpace(string(out))
	if os.Geteuid() != 0 {
		return dir, "a Kubernetes needs root"
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory/cgroup.procs"); err != nil {
		return dir, "a Kubernetes needs cgroups of version 1: nobody has tried its nodes with version 2"
	}
	for _, name := range []string{
		"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns", "kubectl", "helm", "kwok",
	} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return dir, err.Error() + ": run make kubernetes first"
		}
	}
	for program, debian := range map[string]string{
		"containerd": "containerd", "runc": "runc", "ip": "iproute2", "nft": "nftables", "iptables": "iptables", "unshare": "util-linux",
	} {
		if _, err := exec.LookPath(program); err != nil {
			return dir, fmt.Sprintf("a Kubernetes needs %s (apt-get install %s)", program, debian)
		}
	}
	if cniDir() == "" {
		return dir, "a Kubernetes needs CNI's plugins (apt-get install containernetworking-plugins)"
	}
	return dir, ""
}

func cniDir() string {
	for _, dir := range []string{"/opt/cni/bin", "/usr/lib/cni"} {
		if _, err := os.Stat(filepath.Join(dir, "ptp")); err == nil {
			return dir
		}
	}
	return ""
}

// Took logs how long a part took since the part before.
func (c *Cluster) Took(part string) {
	c.t.Helper()
	c.t.Logf("%s: %v", part, time.Since(c.begun).Round(10*time.Millisecond))
	c.begun = time.Now()
}

// In returns the cluster for a subtest.
func (c *Cluster) In(t testing.TB) *Cluster {
	in := *c
	in.t, in.begun = t, time.Now()
	return &in
}

// Command returns a program that runs beside the control plane, as the cluster's administrator.
// Relative paths are the test's.
func (c *Cluster) Command(program string, args ...string) *exec.Cmd {
	if p := filepath.Join(c.bin, program); !strings.Contains(program, "/") {
		if _, err := os.Stat(p); err == nil {
			program = p
		}
	}
	cmd := c.net.Clients.Command(program, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig, "HELM_CACHE_HOME="+c.dir+"/helm",
		"HELM_CONFIG_HOME="+c.dir+"/helm", "HELM_DATA_HOME="+c.dir+"/helm")
	return cmd
}

// Try runs a program as [Cluster.Command] does, with input. It returns stdout, and an error with
// stderr.
func (c *Cluster) Try(input, program string, args ...string) (string, error) {
	cmd := c.Command(program, args...)
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &stderr
	err := proctest.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s%s", program, strings.Join(args, " "), err, &out, &stderr)
	}
	return out.String(), nil
}

// Kubectl returns the output of kubectl.
func (c *Cluster) Kubectl(args ...string) string {
	c.t.Helper()
	return c.must(c.Try("", "kubectl", args...))
}

// Helm returns the output of helm.
func (c *Cluster) Helm(args ...string) string {
	c.t.Helper()
	return c.must(c.Try("", "helm", args...))
}

// Apply applies YAML.
func (c *Cluster) Apply(yaml string) string {
	c.t.Helper()
	return c.must(c.Try(yaml, "kubectl", "apply", "-f", "-"))
}

func (c *Cluster) must(out string, err error) string {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// list returns a JSONPath of a list, or the error's text.
func (c *Cluster) list(kind, path string, args ...string) string {
	out, err := c.Try("", "kubectl", append([]string{"get", kind, "-o", "jsonpath=" + path}, args...)...)
	if err != nil {
		return err.Error()
	}
	return out
}

// Await waits until done returns true. If that does not happen, the failure has its text.
func (c *Cluster) Await(what string, done func() (text string, ok bool)) {
	c.t.Helper()
	last := ""
	defer func() {
		if c.t.Failed() {
			c.t.Logf("last seen while waiting for %s:\n%s", what, last)
		}
	}()
	proctest.Until(c.t, what, func() (ok bool) { last, ok = done(); return ok })
}

// AwaitPods waits until a label selector has exactly n pods in a namespace, all Ready.
func (c *Cluster) AwaitPods(namespace, selector string, n int) {
	c.t.Helper()
	c.Await(fmt.Sprintf("%d Ready pods with %s in %s", n, selector, namespace), func() (string, bool) {
		out := c.list("pods", `{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status} {.status.containerStatuses[*].state}{"\n"}{end}`,
			"-n", namespace, "-l", selector)
		return out, strings.Count(out, "\n") == n && strings.Count(out, " True ") == n
	})
}

// Dial connects to an address from the first node. Pods and Services can be reached from there. It
// is a net.Dialer's DialContext.
func (c *Cluster) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return c.Nodes[0].machine.Dial(ctx, network, address)
}
