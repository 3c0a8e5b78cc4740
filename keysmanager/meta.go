package keysmanager

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// metaVersion is the version of the descriptions that the warden keeps with processes and
// descriptors.
const metaVersion = 2

// meta describes an entry of the warden: a zygote's, a replica's or a spare's.
type meta struct {
	Version int                 `json:"version"`
	Zygote  *zygote.Description `json:"zygote,omitempty"`
	Replica *replicaMeta        `json:"replica,omitempty"`
	// It waits for a start. It ends with its daemon, so none is adopted.
	Spare bool `json:"spare,omitempty"`
}

// replicaMeta is what a daemon must know to adopt a replica. The warden's entry also has the
// descriptors of the replica's stdout and stderr.
type replicaMeta struct {
	Replica  string           `json:"replica"`
	Function string           `json:"function"`
	Path     string           `json:"path"`
	Device   string           `json:"device,omitempty"`
	Reserved map[string]int64 `json:"reserved,omitempty"` // bytes by device
	Phases   []node.Phase     `json:"phases,omitempty"`
	Started  time.Time        `json:"started"`
	// Entry of its parent; empty: the warden is its parent.
	Zygote string `json:"zygote,omitempty"`
	Mapped string `json:"mapped,omitempty"` // entry of the memory that it maps
	PID    int    `json:"pid,omitempty"`    // of a zygote's child
	Task   int    `json:"task,omitempty"`   // thread id, of a worker's thread
	// Number that its zygote knows it by, of a zygote's child in a container; 0: its PID.
	Inside int         `json:"inside,omitempty"`
	Group  string      `json:"group,omitempty"` // name of its cgroup
	Limits GroupLimits `json:"limits,omitzero"` // of its cgroup
	// CPU limit now, in thousandths of a core; 0: none.
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
		} else if p.task != p.pid {
			r.Inside = p.task
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
		panic(err) // cannot happen: it has only strings and numbers
	}
	return b
}

// decode decodes the description of an entry.
func decode(b []byte) (meta, error) {
	var m meta
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("description: %w", err)
	}
	switch {
	case m.Version != metaVersion:
		return m, fmt.Errorf("description of version %d, want %d", m.Version, metaVersion)
	case (m.Zygote == nil) == (m.Replica == nil) && !m.Spare:
		return m, errors.New("description of neither a zygote nor a replica, or of both")
	}
	return m, nil
}
