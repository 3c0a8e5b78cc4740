package zygote

import (
	"cmp"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// Description is what a daemon must know to adopt a zygote. The warden keeps the description with
// the zygote's descriptors: control socket, stdout and stderr. If memory takes the place of a
// zygote, the descriptors are the files of the graph and the weights.
type Description struct {
	Namespace string        `json:"namespace"`
	Digest    string        `json:"digest"`
	Model     string        `json:"model"`
	Process   string        `json:"process,omitempty"`
	Form      Form          `json:"form,omitempty"`
	Runtime   string        `json:"runtime,omitempty"`
	Seen      string        `json:"seen,omitempty"` // of the function's environment
	Prepacked bool          `json:"prepacked,omitempty"`
	Function  string        `json:"function"` // that it was loaded for
	Bytes     int64         `json:"bytes,omitempty"`
	Loaded    time.Time     `json:"loaded,omitzero"` // zero: not yet
	Load      time.Duration `json:"load,omitempty"`

	Generation uint64 `json:"generation,omitempty"` // of the parameters
	Replaced   bool   `json:"replaced,omitempty"`   // they have been invalidated

	Worker string `json:"worker,omitempty"` // its name; empty: it is no worker
	Device string `json:"device,omitempty"` // of a worker

	// Network that it is in, as in its key. Empty: the machine's, in which earlier releases started
	// all zygotes.
	Network string `json:"network,omitempty"`
	Secrets string `json:"secrets,omitempty"` // as in its key
	Options string `json:"options,omitempty"` // as in its key

	Cgroups
}

// Cgroups are the cgroups of a zygote and its next replica.
type Cgroups struct {
	// Group is the name of the zygote's. Empty: the name of its entry, as in earlier releases.
	Group  string           `json:"group,omitempty"`
	Limits resources.Limits `json:"limits,omitzero"` // of the replica's
}

// Key returns the key of the zygote.
func (d Description) Key() Key {
	return Key{
		Namespace: d.Namespace, Digest: d.Digest, Model: d.Model, Process: d.Process, Form: d.Form, Engine: d.Runtime, Environment: d.Seen,
		Generation: d.Generation, Worker: d.Worker, Device: d.Device, Network: cmp.Or(d.Network, resources.NetworkHost), Secrets: d.Secrets, Options: d.Options,
	}
}

// Describe returns the description of the zygote as it is now.
func (z *Zygote) Describe() Description {
	z.Family.mu.Lock()
	defer z.Family.mu.Unlock()
	k := z.Key
	return Description{
		Namespace: k.Namespace, Digest: k.Digest, Model: k.Model, Process: k.Process, Form: k.Form, Prepacked: z.Prepacked, Function: z.Function,
		Runtime: k.Engine, Seen: k.Environment, Worker: k.Worker, Device: k.Device, Network: k.Network, Secrets: k.Secrets, Options: k.Options,
		Bytes: z.Bytes, Loaded: z.Loaded, Load: z.Load, Generation: k.Generation, Replaced: z.Family.replaced, Cgroups: Cgroups{Group: z.held.Group().ID(), Limits: z.Family.limits},
	}
}
