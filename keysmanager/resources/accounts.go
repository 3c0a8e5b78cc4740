package resources

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Accounts assigns the users that processes run as; sandbox.Accounts implements it.
type Accounts interface {
	// Take returns an unused account in the group that may read its secrets. Group 0 gives the account
	// a group of its own.
	Take(gid int) (*sandbox.Lease, error)
	// Adopt returns the account of a process that an earlier daemon has started; nil: it has none.
	Adopt(pid int) (*sandbox.Lease, error)
	// Resume returns the account of a user that an earlier daemon had taken.
	Resume(uid, gid int) (*sandbox.Lease, error)
}

// AccountUser says which processes use the account that a process is started with.
type AccountUser int

// The processes that may use an account.
const (
	Itself      AccountUser = iota // the process
	ItsPrograms                    // the programs of a watchdog, which starts each of them
	Nobody                         // a watchdog whose programs have a root of their own
)

// maxFamily bounds the processes and threads of a zygote and all its replicas together.
const maxFamily = 8192

// heldAccount is an account in use.
type heldAccount struct {
	lease    *sandbox.Lease
	function string
	entry    string // of the warden
	most     int    // processes and threads
	packing  string // folder into which its zygote packs its model; empty: none
	packed   string // the name of that folder once packed
}

func newHeldAccount(lease *sandbox.Lease, function, entry string) *heldAccount {
	return &heldAccount{lease: lease, function: function, entry: entry, most: sandbox.MaxProcesses}
}

// apply makes a command run with the account, and gives the account access to the files that it
// needs in addition to its image.
func (l *heldAccount) apply(c *sandbox.Command, who AccountUser, t Tenant) error {
	if who == ItsPrograms {
		b, err := json.Marshal(l.lease.Account)
		c.Env[wire.EnvAccount] = string(b)
		return err
	}
	c.As, c.Secrets, c.Env[wire.EnvSealed] = &l.lease.Account, t.Secrets, "1"
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
	// Parameters are never shared between namespaces, so each has its own folder.
	l.packed = filepath.Join(folder, t.Namespace)
	if _, err := os.Stat(l.packed); err == nil {
		c.Env[wire.EnvPrepacked] = l.packed
		c.Reads = append(c.Reads, l.packed)
		return nil
	}
	l.packing = l.packed + "." + strconv.Itoa(l.lease.UID) // no namespace has such a name
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

// AdmitTo lets the worker with this pid read an image's files, if the worker has an account.
func (r *Reservation) AdmitTo(pid int, root string) error {
	if r.account == nil {
		return nil
	}
	r.admitting.Lock()
	defer r.admitting.Unlock()
	return sandbox.Reach(pid, &r.account.lease.Account, root)
}

// ShowSecrets lets the zygote with this pid see a function's folder of secrets. It does nothing if
// the zygote has no account. A zygote sees the folder that it was started with, until the folder is
// removed and made again. A worker also needs the folders of its other functions.
func (r *Reservation) ShowSecrets(pid int, folder string) error {
	if r.account == nil || folder == "" {
		return nil
	}
	r.admitting.Lock()
	defer r.admitting.Unlock()
	return sandbox.ReachSecrets(pid, &r.account.lease.Account, folder)
}

// KeepPacked keeps the files that a zygote has packed while it loaded, for later zygotes of its
// namespace.
func (r *Reservation) KeepPacked() {
	l := r.account
	if l == nil || l.packing == "" {
		return
	}
	if os.Remove(l.packing) == nil {
		return // empty: the zygote packed nothing, or could not and has logged why
	}
	err := sandbox.Seize(l.packing, sandbox.MaxFileSize)
	if err == nil {
		err = os.Rename(l.packing, l.packed)
	}
	// Otherwise another zygote was faster.
	if _, there := os.Stat(l.packed); err != nil && there != nil {
		r.pool.cfg.Log.Warn("pre-packed parameters are not kept", "function", l.function, "error", err)
	}
}

// vacate returns the account of an ended process, if it had one. It kills processes that the ended
// one has left running.
func (r *Reservation) vacate() {
	l, log := r.account, r.pool.cfg.Log
	if l == nil {
		return
	}
	n, err := l.lease.Kill()
	if err != nil {
		log.Error("processes may still run", "function", l.function, "error", err)
	}
	if n >= l.most*9/10 {
		log.Warn("the limit on processes was reached", "function", l.function, "entry", l.entry, "killed", n, "most", l.most)
		r.pool.cfg.Output(l.function, l.entry, "stderr", fmt.Sprintf("stagecoach: it left %d processes and threads of at most %d; they were killed", n, l.most))
	}
	if err := l.lease.Release(); err != nil {
		log.Warn("an account is not completely cleaned up", "function", l.function, "error", err)
	}
	if l.packing != "" {
		_ = os.RemoveAll(l.packing) // half-packed files; a complete folder was renamed
	}
}

// adoptAccount takes over the account of a process that an earlier daemon has started.
func (r *Reservation) adoptAccount(k warden.Kept) {
	accounts := r.pool.cfg.Accounts
	if accounts == nil || k.PID == 0 || k.Ended {
		return
	}
	lease, err := accounts.Adopt(k.PID)
	if program := programAccount(k.PID); err == nil && lease == nil && program != nil {
		lease, err = accounts.Resume(program.UID, program.GID)
	}
	if err != nil {
		r.pool.cfg.Log.Warn("an adopted process has no account of its own", "entry", k.Name, "pid", k.PID, "error", err)
		return
	}
	if lease != nil {
		r.account = newHeldAccount(lease, "", k.Name)
		r.account.most = maxFamily
	}
}

// programAccount returns the account of a watchdog's programs, from the watchdog's environment;
// nil: none.
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
