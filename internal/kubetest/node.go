package kubetest

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
)

// Node is a machine of the cluster.
type Node struct {
	Name string
	IP   string
	Pods string // the addresses of its pods, as CIDR

	c       *Cluster
	machine *netnstest.Machine
	process *process
}

// startNode starts a node. It is Ready some time later.
func (c *Cluster) startNode(i int, m *netnstest.Machine) *Node {
	c.t.Helper()
	n := &Node{Name: fmt.Sprintf("node-%d", i), IP: m.IP, Pods: fmt.Sprintf("10.244.%d.0/24", i+1), c: c, machine: m}
	dir := filepath.Join(c.dir, n.Name)
	files := strings.NewReplacer("@DIR@", dir, "@CNIBIN@", cniDir(), "@REGISTRY@", c.Registry, "@PODS@", n.Pods,
		"@CGROUP@", c.cgroups+"/"+n.Name, "@IPADDR@", n.IP, "@DNS@", dnsIP, "@KUBECONFIG@", c.Kubeconfig)
	for name, text := range map[string]string{
		"containerd.toml": containerdConfig, "cni/10-pods.conflist": cniConfig, "kubelet.yaml": kubeletConfig, "proxy.yaml": proxyConfig,
		"hosts/" + c.Registry + "/hosts.toml": "server = \"http://@REGISTRY@\"\n[host.\"http://@REGISTRY@\"]\n  capabilities = [\"pull\", \"resolve\"]\n",
	} {
		write(c.t, filepath.Join(dir, name), files.Replace(text))
	}
	n.process = c.run(m, dir, nodeScript, "NAME="+n.Name, fmt.Sprintf("NUMBER=%d", i+1), fmt.Sprintf("NODES=%d", c.size()),
		"CGROUP="+c.cgroups, "KUBECONFIG="+c.Kubeconfig, "SERVER_IP="+c.net.Clients.IP)
	return n
}

// size is the number of machines, those that will be nodes included.
func (c *Cluster) size() int { return len(c.net.Others()) }

// Kill ends everything on the node at once, as a power cut does. Its network stays.
func (n *Node) Kill() {
	n.c.t.Helper()
	n.process.kill(n.c.t)
}

const containerdConfig = `version = 2
root = "@DIR@/root"
state = "@DIR@/state"
[grpc]
  address = "@DIR@/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "@REGISTRY@/pod:1"
  stream_server_address = "127.0.0.1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "@CNIBIN@"
    conf_dir = "@DIR@/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "@DIR@/hosts"
[plugins."io.containerd.internal.v1.opt"]
  path = "@DIR@/opt"
`

// cniConfig gives each pod a link of its own to the node. On a bridge, the answer of a pod to
// another pod of its node would not pass through the node's translation of addresses.
const cniConfig = `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "ptp", "ipam": {"type": "host-local", "dataDir": "/var/lib/cni/ipam", "ranges": [[{"subnet": "@PODS@"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
`

const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /@CGROUP@
address: @IPADDR@
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://@DIR@/c.sock
clusterDNS: [@DNS@]
clusterDomain: cluster.local
failSwapOn: false
imagePullCredentialsVerificationPolicy: NeverVerify
evictionHard: {memory.available: "0%", nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 4s
resolvConf: ""
`

const proxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddress: @IPADDR@
clientConnection: {kubeconfig: @KUBECONFIG@}
conntrack: {maxPerCore: 0, min: 0, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s}
nftables: {minSyncPeriod: 100ms}
`
