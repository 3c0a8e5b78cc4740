package kubetest

import (
	_ "embed"
	"path/filepath"
	"strings"
)

//go:embed dns.yaml
var dnsObjects string

// startDNS runs CoreDNS as a pod, and waits until it is Ready.
func (c *Cluster) startDNS() {
	c.t.Helper()
	image := c.Image("coredns:1", map[string]string{"/coredns": filepath.Join(c.bin, "coredns")}, "/coredns")
	c.Apply(strings.NewReplacer("IMAGE", image, "ADDRESS", dnsIP).Replace(dnsObjects))
	c.AwaitPods("kube-system", "k8s-app=kube-dns", 1)
}
