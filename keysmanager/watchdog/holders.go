package watchdog

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// processes holds all processes in /proc by pid.
type processes map[int]proc

type proc struct{ parent, session int }

// readProcesses reads /proc. It leaves out processes that end meanwhile.
func readProcesses() processes {
	entries, _ := os.ReadDir("/proc") // without /proc, nobody is found
	all := processes{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, ok := readProcess(pid); ok {
			all[pid] = p
		}
	}
	return all
}

// readProcess reads a process's entry in /proc. ok is false if the process has ended.
func readProcess(pid int) (p proc, ok bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return proc{}, false
	}
	// fields: state, parent, group, session.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 4 {
		return proc{}, false
	}
	parent, err1 := strconv.Atoi(f[1])
	session, err2 := strconv.Atoi(f[3])
	return proc{parent, session}, err1 == nil && err2 == nil
}

// rootOf returns the process from which a function's program and all that it starts descend: this
// process, or the first process of the program's container.
func rootOf(program int) int {
	first, ok := readProcess(program)
	for p := first; ok && p.parent != os.Getpid(); p, ok = readProcess(p.parent) {
		if p.parent <= 1 {
			return first.parent
		}
	}
	return os.Getpid()
}

// ours returns the processes of the replica whose watchdog is self: self's descendants and the
// processes of its session, without self. The program stays in the watchdog's session unless it has
// its own root.
func (all processes) ours(self int) []int {
	var out []int
	for pid, p := range all {
		if pid != self && (p.session == all[self].session || slices.Contains(all.ancestors(pid), self)) {
			out = append(out, pid)
		}
	}
	return out
}

// sockets returns the inodes of all open sockets of the replica's processes.
func (all processes) sockets(self int) map[uint32]bool {
	own := map[uint32]bool{}
	for _, pid := range all.ours(self) {
		for _, inode := range sockets(pid) {
			own[inode] = true
		}
	}
	return own
}

// ancestors returns the process itself, its parent, and so on.
func (all processes) ancestors(pid int) (out []int) {
	for range len(all) { // /proc is not read in one instant, so the parents may form a circle
		p, ok := all[pid]
		if !ok {
			break
		}
		out, pid = append(out, pid), p.parent
	}
	return out
}

// sockets returns the inodes of a process's open sockets, or nil if this process may not look.
func sockets(pid int) (inodes []uint32) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir) // it may have ended or belong to another user
	for _, e := range entries {
		link, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		number, ok := strings.CutPrefix(link, "socket:[")
		if n, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 32); ok && err == nil {
			inodes = append(inodes, uint32(n))
		}
	}
	return inodes
}

// holder returns the pid of a process that has the socket open; 0: no process that this one may
// look into.
func (all processes) holder(inode uint32) int {
	for _, pid := range slices.Sorted(maps.Keys(all)) {
		if slices.Contains(sockets(pid), inode) {
			return pid
		}
	}
	return 0
}

// describe returns the names of a process and of its function, for an error. The function's name is
// in the environment of its watchdog.
func (all processes) describe(pid int) string {
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // it may have ended
	what := fmt.Sprintf("process %d (%s)", pid, bytes.TrimSpace(comm))
	for _, p := range all.ancestors(pid) {
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p)) // it may belong to another user
		for _, kv := range bytes.Split(env, []byte{0}) {
			if name, ok := bytes.CutPrefix(kv, []byte(wire.EnvFunction+"=")); ok {
				return fmt.Sprintf("function %q, %s", name, what)
			}
		}
	}
	return what
}
