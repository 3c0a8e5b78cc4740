package keysmanager

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Accounts gives out the users that processes run as; sandbox.Accounts does.
type Accounts interface {
	// Take returns an account that nobody has, in the group that may read its secrets; 0: in one of
	// its own.
	Take(gid int) (*sandbox.Lease, error)
	// Adopt returns the account of a process that an earlier daemon has started; nil: it has none.
	Adopt(pid int) (*sandbox.Lease, error)
	// Resume returns that of a user whom an earlier daemon had taken.
	Resume(uid, gid int) (*sandbox.Lease, error)
}

// lodger is who of a process has an account.
type lodger int

const (
	itself      lodger = iota
	itsPrograms        // of a watchdog, which starts each of them anew
	nobody             // a watchdog whose programs have a root of their own
)

// maxFamily bounds the processes and threads of a zygote and all its replicas together.
const maxFamily = 8192

// lodging is an account in use.
type lodging struct {
	lease    *sandbox.Lease
	function string
	most     int    // processes and threads
	packing  string // folder that its zygote packs its model into; empty: it does not
	packed   string // folder that this becomes
}

// begin has the warden start a process of a function, in the network that the function asks for, and with an
// account of its own where there are any.
func (m *Manager) begin(s node.Spec, who lodger, p warden.Process) (pid int, err error) {
	release, err := m.connect(&p.Command, s, who)
	if err != nil {
		return 0, err
	}
	defer release()
	if m.cfg.Accounts == nil || who == nobody {
		return m.warden.Start(p)
	}
	lease, err := m.cfg.Accounts.Take(s.Group)
	if err != nil {
		return 0, err
	}
	l := &lodging{lease: lease, function: s.Function, most: sandbox.MaxProcesses}
	m.lodge(p.Name, l)
	if err = l.furnish(&p.Command, who, s); err == nil {
		pid, err = m.warden.Start(p)
	}
	if err != nil {
		m.vacate(p.Name)
	}
	return pid, err
}

func (m *Manager) lodge(entry string, l *lodging) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lodgings == nil {
		m.lodgings = map[string]*lodging{}
	}
	m.lodgings[entry] = l
}

// furnish makes a command one of the account, with what it has to reach beside its image.
func (l *lodging) furnish(c *sandbox.Command, who lodger, s node.Spec) error {
	if who == itsPrograms {
		b, err := json.Marshal(l.lease.Account)
		c.Env[wire.EnvAccount] = string(b)
		return err
	}
	c.As, c.Secrets, c.Env[wire.EnvSealed] = &l.lease.Account, s.Secrets, "1"
	if c.Env[wire.EnvZygoteFD] != "" {
		l.most = maxFamily
		c.Processes = maxFamily
	}
	if library := c.Env[wire.EnvORT]; library != "" {
		c.Reads = append(c.Reads, library)
	}
	folder := c.Env[wire.EnvPrepacked]
	if folder == "" {
		return nil
	}
	l.packed = filepath.Join(folder, s.Namespace) // what one namespace has written, no other one maps
	if _, err := os.Stat(l.packed); err == nil {
		c.Env[wire.EnvPrepacked] = l.packed
		c.Reads = append(c.Reads, l.packed)
		return nil
	}
	l.packing = l.packed + "." + strconv.Itoa(l.lease.UID) // a name that no namespace has
	if err := os.RemoveAll(l.packing); err != nil {
		return err
	}
	if err := os.Mkdir(l.packing, 0o700); err != nil {
		return err
	}
	c.Env[wire.EnvPrepacked] = l.packing
	c.Writes = append(c.Writes, l.packing)
	return os.Chown(l.packing, l.lease.UID, l.lease.GID)
}

// admitTo has a worker, if it has an account, read an image's files.
func (m *Manager) admitTo(z *zygote, root string) error {
	m.mu.Lock()
	l := m.lodgings[z.entry]
	m.mu.Unlock()
	if l == nil {
		return nil
	}
	z.admitting.Lock()
	defer z.admitting.Unlock()
	return sandbox.Reach(z.pid, &l.lease.Account, root)
}

// showSecrets makes a function's folder of secrets appear to a zygote, if the zygote has an
// account. A zygote sees the folder that it was started with. A worker also needs the folders of
// its other functions, and every zygote needs a folder that was removed and made anew since.
func (m *Manager) showSecrets(z *zygote, folder string) error {
	m.mu.Lock()
	l := m.lodgings[z.entry]
	m.mu.Unlock()
	if l == nil || folder == "" {
		return nil
	}
	z.admitting.Lock()
	defer z.admitting.Unlock()
	return sandbox.ReachSecrets(z.pid, &l.lease.Account, folder)
}

// settle keeps what a zygote that has loaded has packed, for the next ones of its namespace.
func (m *Manager) settle(entry string) {
	m.mu.Lock()
	l := m.lodgings[entry]
	m.mu.Unlock()
	if l == nil || l.packing == "" {
		return
	}
	if os.Remove(l.packing) == nil {
		return // empty: there was nothing to make, or it could not and has said why
	}
	err := sandbox.Seize(l.packing, sandbox.MaxFileSize)
	if err == nil {
		err = os.Rename(l.packing, l.packed)
	}
	if _, there := os.Stat(l.packed); err != nil && there != nil { // else another one was faster
		m.cfg.Log.Warn("pre-packed parameters are not kept", "function", l.function, "error", err)
	}
}

// vacate gives the account of an ended process back, if it had one. What it has left running is killed.
func (m *Manager) vacate(entry string) {
	m.mu.Lock()
	l := m.lodgings[entry]
	delete(m.lodgings, entry)
	m.mu.Unlock()
	if l == nil {
		return
	}
	n, err := l.lease.Kill()
	if err != nil {
		m.cfg.Log.Error("processes may be left", "function", l.function, "error", err)
	}
	if n >= l.most*9/10 {
		m.cfg.Log.Warn("it had as many processes as it may", "function", l.function, "entry", entry, "killed", n, "most", l.most)
		m.cfg.Output(l.function, entry, "stderr", fmt.Sprintf("stagecoach: it left %d processes and threads of at most %d; they were killed", n, l.most))
	}
	if err := l.lease.Release(); err != nil {
		m.cfg.Log.Warn("an account is not given back whole", "function", l.function, "error", err)
	}
	if l.packing != "" {
		_ = os.RemoveAll(l.packing) // what was half made; otherwise it is gone already
	}
}

// adoptAccount takes over the account of a process that an earlier daemon has started.
func (m *Manager) adoptAccount(k warden.Kept) {
	if m.cfg.Accounts == nil || k.PID == 0 || k.Ended {
		return
	}
	lease, err := m.cfg.Accounts.Adopt(k.PID)
	if program := programAccount(k.PID); err == nil && lease == nil && program != nil {
		lease, err = m.cfg.Accounts.Resume(program.UID, program.GID)
	}
	if err != nil {
		m.cfg.Log.Warn("what runs has a user that is not its own", "entry", k.Name, "pid", k.PID, "error", err)
		return
	}
	if lease != nil {
		m.lodge(k.Name, &lodging{lease: lease, most: maxFamily})
	}
}

// programAccount is that of the programs of a watchdog, as its environment has it; nil: it has none.
func programAccount(pid int) *sandbox.Account {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil // it has ended
	}
	for kv := range strings.SplitSeq(string(b), "\x00") {
		var a sandbox.Account
		if text, ok := strings.CutPrefix(kv, wire.EnvAccount+"="); ok && json.Unmarshal([]byte(text), &a) == nil {
			return &a
		}
	}
	return nil
}
