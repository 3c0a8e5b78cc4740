package node

import "fmt"

// Spec is what a KeysManager needs to know about a function to start its replicas and to load its
// parameters.
type Spec struct {
	Function  string `json:"function"` // pipeline.Key
	Namespace string `json:"namespace"`
	// gid of the group that may read the function's secrets. With an account, the function runs in
	// this group. 0: the function has a group of its own.
	Group int `json:"group,omitempty"`
	// Absolute path of the folder with its secrets; empty: it has none. The last part of the path
	// differs for different sets of secrets in a namespace.
	Secrets string `json:"secrets,omitempty"`
	Image   string `json:"image"` // name that the node's images know
	// The env fprocess; empty: the image's ./stage, or its entrypoint.
	Process string `json:"process,omitempty"`
	Health  string `json:"health,omitempty"` // of a function that speaks HTTP: wire.EnvHealth
	// HTTP path of the readiness check of a function that speaks HTTP; empty: see package watchdog.
	Ready string `json:"ready,omitempty"`
	// default, host or none (annotation stagecoach.dev/network); empty: default.
	Network string `json:"network,omitempty"`
	// Address and port of this machine where the function's processes reach other functions, as
	// gateway.openfaas; empty: nowhere.
	Gateway string `json:"gateway,omitempty"`
	// Path of the socket where the function's watchdogs meet a gateway on another machine; empty:
	// the gateway is on this machine.
	Rendezvous string `json:"rendezvous,omitempty"`
	// Environment of the function. STAGECOACH_MODEL makes it a function with parameters.
	Env map[string]string `json:"env,omitempty"`
	// Start path: auto, fork, heap, map or cold (docs/adr/0023); empty: auto.
	Start string `json:"start,omitempty"`
	// Name of the process that the function shares with others of its namespace on a device
	// (docs/adr/0033); empty: none.
	Worker string `json:"worker,omitempty"`
	// The program may write only to /tmp. This applies if the image is its root.
	ReadOnly bool `json:"readOnly,omitempty"`
	// Bytes that a replica may use (limits.memory); 0: not bounded.
	Memory int64 `json:"memory,omitempty"`
	// Thousandths of a core that a replica may use (limits.cpu); 0: not bounded.
	CPUMilli int `json:"cpuMilli,omitempty"`
	// How many devices a replica gets. Children may be parked on the device of a function with one.
	Devices int `json:"devices,omitempty"`
	// Bytes that a replica may use of each of its devices; 0: all of it, exclusively.
	DeviceMemory int64 `json:"deviceMemory,omitempty"`
	// What its processes get beyond the above, or give up.
	Options Options `json:"options,omitzero"`
}

// Options are a part of a [Spec].
type Options struct {
	// Name of a runtime class of the node (annotation stagecoach.dev/runtime-class); empty: the
	// default.
	RuntimeClass string `json:"runtimeClass,omitempty"`
	// Capabilities that its program gives up, such as CAP_CHOWN, or ALL.
	DropCapabilities []string `json:"dropCapabilities,omitempty"`
	// CDI's names of devices that its containers get (annotation stagecoach.dev/cdi-devices).
	CDIDevices []string `json:"cdiDevices,omitempty"`
	// How many containers wait for the function's next starts (annotation stagecoach.dev/spares).
	Spares int `json:"spares,omitempty"`
}

// validate returns an error if a field is missing that every function has.
func (s Spec) validate() error {
	if s.Function == "" || s.Namespace == "" || s.Image == "" {
		return fmt.Errorf("spec: function %q, namespace %q, image %q, want all of them", s.Function, s.Namespace, s.Image)
	}
	return nil
}
