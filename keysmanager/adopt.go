package keysmanager

import (
	"crypto/rand"
	"encoding/json"
	"time"

	"github.com/stagecoach-serving/stagecoach/warden"
)

// metaVersion is the version of what is kept by the warden beside descriptors and processes.
const metaVersion = 1

// meta describes an entry of the warden: a zygote's or a replica's.
type meta struct {
	Version int          `json:"version"`
	Zygote  *zygoteMeta  `json:"zygote,omitempty"`
	Replica *replicaMeta `json:"replica,omitempty"`
}

// zygoteMeta is what a daemon has to know to go on with a zygote. Its descriptors are its control socket, stdout, stderr.
type zygoteMeta struct {
	Namespace string        `json:"namespace"`
	Digest    string        `json:"digest"`
	Model     string        `json:"model"`
	Process   string        `json:"process,omitempty"`
	Function  string        `json:"function"` // that it was loaded for
	Bytes     int64         `json:"bytes,omitempty"`
	Loaded    time.Time     `json:"loaded,omitzero"` // zero: not yet
	Load      time.Duration `json:"load,omitempty"`
}

// replicaMeta is what a daemon has to know to go on with a replica. Its descriptors are its stdout and stderr.
type replicaMeta struct {
	Replica  string           `json:"replica"`
	Function string           `json:"function"`
	Path     string           `json:"path"`
	Device   string           `json:"device,omitempty"`
	Reserved map[string]int64 `json:"reserved,omitempty"` // bytes by device
	Phases   []Phase          `json:"phases,omitempty"`
	Started  time.Time        `json:"started"`
	Zygote   string           `json:"zygote,omitempty"` // its parent's entry; empty: its parent is the warden
	PID      int              `json:"pid,omitempty"`    // of a zygote's child
}

func (z *zygote) meta(function string) []byte {
	return encode(meta{Zygote: &zygoteMeta{
		Namespace: z.key.namespace, Digest: z.key.digest, Model: z.key.model, Process: z.key.process, Function: function,
		Bytes: z.bytes, Loaded: z.loaded, Load: z.load,
	}})
}

func (p *process) meta() []byte {
	r := &replicaMeta{
		Replica: p.replica, Function: p.function, Path: p.path, Device: p.device, Reserved: p.reserved, Phases: p.phases, Started: p.started, PID: p.pid,
	}
	if p.zygote != nil {
		r.Zygote = p.zygote.entry
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

// await returns where the end of a process will be told.
func (m *Manager) await(entry string) <-chan warden.Exit {
	ch := make(chan warden.Exit, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.awaited[entry] = ch
	return ch
}

// forgo says that nobody awaits the end of a process any more.
func (m *Manager) forgo(entry string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.awaited, entry)
}

// ended takes the end of a process from the warden, which must not be called with m.mu held: it may wait for this.
func (m *Manager) ended(e warden.Exit) {
	m.mu.Lock()
	ch := m.awaited[e.Name]
	delete(m.awaited, e.Name)
	m.mu.Unlock()
	if ch != nil {
		ch <- e // has room for the only one
	}
}

// mourned reports the end of a process of the warden's own once it has come, unless it is left to the warden.
func (m *Manager) mourned(p *process, ended <-chan warden.Exit) {
	select {
	case e := <-ended:
		p.end(describe(e))
	case <-m.detached:
		p.output.Abandon()
	}
}

// drop has the warden forget an entry.
func (m *Manager) drop(entry string) {
	if err := m.warden.Drop(entry); err != nil {
		m.cfg.Log.Warn("warden keeps what has ended", "error", err)
	}
}

// adopt takes over what an earlier daemon has left to the warden.
func (m *Manager) adopt() error {
	_, err := m.warden.Attach(m.ended)
	return err
}
