package pods

import (
	"cmp"
	"crypto/rand"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Labels of pods.
const (
	LabelFunction = "faas_function" // as in OpenFaaS
	LabelMachine  = "stagecoach.dev/machine"
	// LabelReplica has the replica, or the zygote whose forks are the replicas.
	LabelReplica      = "stagecoach.dev/replica"
	LabelInstallation = "stagecoach.dev/installation"
	labelOwner        = "stagecoach.dev/run"
	labelManaged      = "app.kubernetes.io/managed-by"
	annoImage         = "stagecoach.dev/image"
)

// Container is the name of the container with the program.
const Container = "function"

// Names of volumes.
const (
	runVolume = "run"
	tmpVolume = "tmp"
	// filesVolume and a number name the volumes with copies of files, such as secrets.
	filesVolume = "files-"
)

// copier is the user of the init container that adds our first program.
const copier = 65532

// maxFiles bounds the files that are copied into a pod, such as secrets, as a size of Kubernetes.
const maxFiles = "16Mi"

// grace is the time that a pod has, in seconds, once somebody has asked for its deletion. Its node
// uses it to let running calls end.
const grace = 30

// The first resources of a pod. A pod that has requests without limits can get limits later,
// because that does not change its class of service.
var firstRequests = map[string]string{"cpu": "10m", "memory": strconv.Itoa(ownMemory)}

// label returns a command's label, or that of all commands.
func (r *Runtime) label(c sandbox.Command, name string) string {
	return cmp.Or(c.Labels[name], r.cfg.Labels[name])
}

// labelValue returns a text that is valid as the value of a label.
func labelValue(text string) string {
	clean := strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.' {
			return c
		}
		return '-'
	}, text)
	return strings.Trim(clean[:min(len(clean), 63)], "-_.")
}

// podName returns a name that says which function a pod is of. No other pod has it. entry is the
// unique name of its process on the node, or empty: then another pod may have the same function.
func podName(function, entry string) string {
	const most, random = 63 - 11, 10
	name := strings.TrimRight(function[:min(len(function), most)], "-")
	own := strings.ToLower(entry[strings.LastIndexByte(entry, '-')+1:])
	if len(own) < random {
		own = strings.ToLower(rand.Text())
	}
	return name + "-" + own[:random]
}

// pod returns the pod of a command, whose program gets o.
func (r *Runtime) pod(c sandbox.Command, o sandbox.Outline, namespace string) kube.Pod {
	function, _ := r.cfg.Named(r.label(c, sandbox.LabelFunction))
	no, seconds := false, int64(grace)
	p := kube.Pod{
		Metadata: kube.Meta{
			Name: podName(function, c.Labels[sandbox.LabelEntry]), Namespace: namespace, Annotations: map[string]string{annoImage: r.label(c, sandbox.LabelImage)},
			Labels: map[string]string{LabelFunction: labelValue(function), LabelMachine: r.cfg.Machine, LabelInstallation: r.cfg.Installation, LabelReplica: labelValue(r.label(c, sandbox.LabelReplica)), labelOwner: r.owner, labelManaged: "stagecoach"},
		},
		Spec: kube.PodSpec{
			Affinity: onMachine(r.cfg.Machine), MountAccount: &no, ServiceLinks: &no, RestartPolicy: "Never", Grace: &seconds, RuntimeClass: c.Options.Class, Tolerations: r.cfg.Tolerations,
			SecurityContext: map[string]any{"seccompProfile": map[string]any{"type": "RuntimeDefault"}},
		},
	}
	for _, name := range r.cfg.PullSecrets {
		p.Spec.PullSecrets = append(p.Spec.PullSecrets, map[string]any{"name": name})
	}
	run := kube.Mount{Name: runVolume, At: entry.Folder}
	p.Spec.Volumes = []kube.Volume{{Name: runVolume, Empty: map[string]any{}}, {Name: tmpVolume, Empty: map[string]any{"medium": "Memory", "sizeLimit": "1Gi"}}}
	main := kube.Container{
		Name: Container, Image: r.cfg.Image, Command: []string{r.cfg.Init, entry.PodCommand}, Mounts: []kube.Mount{run, {Name: tmpVolume, At: "/tmp"}},
		Resources: ofOptions(c.Options), SecurityContext: restricted(),
		Resize: []kube.ResizeRule{{Resource: "cpu", Policy: "NotRequired"}, {Resource: "memory", Policy: "NotRequired"}},
	}
	if c.Chroot != "" {
		r.ownImage(c, o, &p, &main, run)
	} else {
		r.ourImage(c, &p, &main)
	}
	p.Spec.Containers = []kube.Container{main}
	return p
}

// ownImage makes a pod run the image of its function, as the user that the image names. An init
// container adds our first program.
func (r *Runtime) ownImage(c sandbox.Command, o sandbox.Outline, p *kube.Pod, main *kube.Container, run kube.Mount) {
	program := filepath.Join(entry.Folder, "init")
	p.Spec.SecurityContext["supplementalGroups"] = append([]int{}, o.Groups...)
	main.SecurityContext["runAsUser"], main.SecurityContext["runAsGroup"] = o.UID, o.GID
	if o.UID != 0 {
		main.SecurityContext["runAsNonRoot"] = true
	} else if kept := c.Options.Kept(); len(kept) > 0 {
		for i := range kept {
			kept[i] = strings.TrimPrefix(kept[i], "CAP_")
		}
		main.SecurityContext["capabilities"] = map[string]any{"drop": []string{"ALL"}, "add": kept}
	}
	main.Image, main.Command = r.label(c, sandbox.LabelImage), []string{program, entry.PodCommand}
	if c.ReadOnly {
		main.SecurityContext["readOnlyRootFilesystem"] = true
	} else {
		main.Mounts = main.Mounts[:1] // its own /tmp
	}
	main.Mounts[0].ReadOnly = true
	for i, b := range c.Binds {
		name := filesVolume + strconv.Itoa(i)
		p.Spec.Volumes = append(p.Spec.Volumes, kube.Volume{Name: name, Empty: map[string]any{"medium": "Memory", "sizeLimit": maxFiles}})
		main.Mounts = append(main.Mounts, kube.Mount{Name: name, At: filepath.Clean(b.To)})
	}
	copies := restricted()
	copies["runAsNonRoot"], copies["runAsUser"], copies["runAsGroup"] = true, copier, copier
	p.Spec.InitContainers = []kube.Container{{
		Name: "init", Image: r.cfg.Image, Command: []string{r.cfg.Init, entry.CopyCommand, program}, Mounts: []kube.Mount{run},
		Resources: kube.Resources{Requests: firstRequests}, SecurityContext: copies,
	}}
}

// ourImage makes a pod run Stagecoach's image, which has what stages expect of a machine. The files
// of the function are mounted into it later, below empty volumes.
func (r *Runtime) ourImage(c sandbox.Command, p *kube.Pod, main *kube.Container) {
	main.SecurityContext["readOnlyRootFilesystem"] = true
	main.SecurityContext["runAsNonRoot"] = true
	if c.As != nil {
		main.SecurityContext["runAsUser"], main.SecurityContext["runAsGroup"] = c.As.UID, c.As.GID
	}
	for _, top := range tops(c) {
		name := "at-" + strings.Trim(strings.ToLower(top), "/.")
		p.Spec.Volumes = append(p.Spec.Volumes, kube.Volume{Name: name, Empty: map[string]any{}})
		main.Mounts = append(main.Mounts, kube.Mount{Name: name, At: top})
	}
}

// ofOptions returns what a container of these options may use, and our first program in it.
func ofOptions(o sandbox.Options) kube.Resources {
	out := kube.Resources{Requests: maps.Clone(firstRequests)}
	limit := func(resource, quantity string) {
		if out.Limits == nil {
			out.Limits = map[string]string{}
		}
		out.Limits[resource], out.Requests[resource] = quantity, quantity
	}
	if o.Memory > 0 {
		limit("memory", strconv.FormatInt(ownMemory+o.Memory, 10))
	}
	if o.CPUMilli > 0 {
		limit("cpu", strconv.Itoa(o.CPUMilli)+"m")
	}
	return out
}

// system are the folders of Stagecoach's image that pods see.
var system = []string{"/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/tmp", "/dev", "/proc", "/sys"}

// tops returns the first folders of a command's paths, without those of the system.
func tops(c sandbox.Command) (out []string) {
	for _, path := range slices.Concat([]string{c.Dir, c.Secrets}, c.Reads, c.Writes) {
		if path == "" {
			continue
		}
		first, _, _ := strings.Cut(strings.TrimPrefix(filepath.Clean(path), "/"), "/")
		if top := "/" + first; !slices.Contains(system, top) && !slices.Contains(out, top) {
			out = append(out, top)
		}
	}
	return out
}

// restricted returns the rights of a container that Pod Security's level restricted admits.
func restricted() map[string]any {
	return map[string]any{"allowPrivilegeEscalation": false, "capabilities": map[string]any{"drop": []string{"ALL"}}}
}

// onMachine returns the affinity of a pod that may run on one machine alone. So kube-scheduler
// still checks quotas, taints and free resources.
func onMachine(name string) any {
	type list = []any
	return map[string]any{"nodeAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": map[string]any{"nodeSelectorTerms": list{
		map[string]any{"matchFields": list{map[string]any{"key": "metadata.name", "operator": "In", "values": list{name}}}},
	}}}}
}
