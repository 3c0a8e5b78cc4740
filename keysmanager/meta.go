package keysmanager

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// metaVersion is the version of what is kept by the warden beside descriptors and processes.
const metaVersion = 2

// meta describes an entry of the warden: a zygote's or a replica's.
type meta struct {
	Version int                 `json:"version"`
	Zygote  *zygote.Description `json:"zygote,omitempty"`
	Replica *replicaMeta        `json:"replica,omitempty"`
}

// replicaMeta is what a daemon has to know to go on with a replica. Its descriptors are its stdout
// and stderr.
type replicaMeta struct {
	Replica  string           `json:"replica"`
	Function string           `json:"function"`
	Path     string           `json:"path"`
	Device   string           `json:"device,omitempty"`
	Reserved map[string]int64 `json:"reserved,omitempty"` // bytes by device
	Phases   []node.Phase     `json:"phases,omitempty"`
	Started  time.Time        `json:"started"`
	// Its parent's entry; empty: its parent is the warden.
	Zygote string      `json:"zygote,omitempty"`
	Mapped string      `json:"mapped,omitempty"` // the entry of the memory that it maps
	PID    int         `json:"pid,omitempty"`    // of a zygote's child
	Task   int         `json:"task,omitempty"`   // of a worker's thread, its id
	Group  string      `json:"group,omitempty"`  // its cgroup
	Limits GroupLimits `json:"limits,omitzero"`  // of that
	// Of the processor that it may use now; 0: not bounded.
	CPUMilli int `json:"cpuMilli,omitempty"`
}

func (p *process) meta() []byte {
	r := &replicaMeta{
		Replica: p.replica, Function: p.function, Path: p.path, Device: p.device, Reserved: p.held.Devices(), Phases: p.phases, Started: p.started, PID: p.pid,
	}
	if g := p.held.Group(); g != nil {
		r.Group, r.Limits, r.CPUMilli = g.ID(), g.Limits(), g.Milli()
	}
	if p.zygote != nil {
		r.Zygote = p.zygote.Entry
		if p.zygote.Works() {
			r.Task = p.task
		}
	}
	if p.mapped != nil {
		r.Mapped = p.mapped.Entry
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
