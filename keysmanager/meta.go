package keysmanager

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// metaVersion is the version of what is kept by the warden beside descriptors and processes.
const metaVersion = 2

// meta describes an entry of the warden: a zygote's or a replica's.
type meta struct {
	Version int          `json:"version"`
	Zygote  *zygoteMeta  `json:"zygote,omitempty"`
	Replica *replicaMeta `json:"replica,omitempty"`
}

// zygoteMeta is what a daemon has to know to go on with a zygote. Its descriptors are its control socket, stdout,
// stderr; of memory in its place, graph and weights.
type zygoteMeta struct {
	Namespace string        `json:"namespace"`
	Digest    string        `json:"digest"`
	Model     string        `json:"model"`
	Process   string        `json:"process,omitempty"`
	Form      form          `json:"form,omitempty"`
	Runtime   string        `json:"runtime,omitempty"`
	Seen      string        `json:"seen,omitempty"` // of the function's environment
	Prepacked bool          `json:"prepacked,omitempty"`
	Function  string        `json:"function"` // that it was loaded for
	Bytes     int64         `json:"bytes,omitempty"`
	Loaded    time.Time     `json:"loaded,omitzero"` // zero: not yet
	Load      time.Duration `json:"load,omitempty"`

	Generation uint64 `json:"generation,omitempty"` // of the parameters
	Replaced   bool   `json:"replaced,omitempty"`   // they have been invalidated

	Worker string `json:"worker,omitempty"` // its name, when it is one
	Device string `json:"device,omitempty"` // of that

	Network string `json:"network,omitempty"` // that it is in, as Manager.networkOf has it; empty: the machine's, in which earlier releases started all
	Secrets string `json:"secrets,omitempty"` // as its key has it

	Limits GroupLimits `json:"limits,omitzero"` // of its next replica's cgroup
}

// replicaMeta is what a daemon has to know to go on with a replica. Its descriptors are its stdout and stderr.
type replicaMeta struct {
	Replica  string           `json:"replica"`
	Function string           `json:"function"`
	Path     string           `json:"path"`
	Device   string           `json:"device,omitempty"`
	Reserved map[string]int64 `json:"reserved,omitempty"` // bytes by device
	Phases   []node.Phase     `json:"phases,omitempty"`
	Started  time.Time        `json:"started"`
	Zygote   string           `json:"zygote,omitempty"`   // its parent's entry; empty: its parent is the warden
	Mapped   string           `json:"mapped,omitempty"`   // the entry of the memory that it maps
	PID      int              `json:"pid,omitempty"`      // of a zygote's child
	Task     int              `json:"task,omitempty"`     // of a worker's thread, its id
	Group    string           `json:"group,omitempty"`    // its cgroup
	Limits   GroupLimits      `json:"limits,omitzero"`    // of that
	CPUMilli int              `json:"cpuMilli,omitempty"` // of the processor that it may use now; 0: not bounded
}

func (z *zygote) meta() []byte {
	z.mu.Lock()
	defer z.mu.Unlock()
	return encode(meta{Zygote: &zygoteMeta{
		Namespace: z.key.namespace, Digest: z.key.digest, Model: z.key.model, Process: z.key.process, Form: z.key.form, Prepacked: z.prepacked, Function: z.function,
		Runtime: z.key.engineName, Seen: z.key.environment, Worker: z.key.worker, Device: z.key.device, Network: z.key.network, Secrets: z.key.secrets,
		Bytes: z.bytes, Loaded: z.loaded, Load: z.load, Generation: z.key.generation, Replaced: z.replaced, Limits: z.limits,
	}})
}

func (p *process) meta() []byte {
	r := &replicaMeta{
		Replica: p.replica, Function: p.function, Path: p.path, Device: p.device, Reserved: p.held.Devices(), Phases: p.phases, Started: p.started, PID: p.pid,
	}
	if g := p.held.Group(); g != nil {
		r.Group, r.Limits, r.CPUMilli = g.ID(), g.Limits(), g.Milli()
	}
	if p.zygote != nil {
		r.Zygote = p.zygote.entry
		if p.zygote.works() {
			r.Task = p.task
		}
	}
	if p.mapped != nil {
		r.Mapped = p.mapped.entry
	}
	return encode(meta{Replica: r})
}

func encode(m meta) []byte {
	m.Version = metaVersion
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // of strings and numbers
	}
	return b
}

// newEntry returns a name for an entry of the warden that no other has, also of an earlier daemon.
func newEntry(kind string) string { return kind + "-" + rand.Text() }

// decode reads the description of an entry.
func decode(b []byte) (meta, error) {
	var m meta
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("description: %w", err)
	}
	switch {
	case m.Version != metaVersion:
		return m, fmt.Errorf("description of version %d, want %d", m.Version, metaVersion)
	case (m.Zygote == nil) == (m.Replica == nil):
		return m, errors.New("description of neither a zygote nor a replica, or of both")
	}
	return m, nil
}
