package entry

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// HoldCommand is the first argument of [Program] when it waits in place of a program.
const HoldCommand = "hold"

// hidden begins the names of the program's variables while it waits, so that they do not change how
// Program itself runs.
const hidden = "HELD_"

// Held returns what runs in place of a program until that is needed: [Hold], which has the socket
// of its holder as the descriptor fd.
func (w Wanted) Held(fd int) Wanted {
	held := Wanted{Program: Program, Argv: append([]string{Program, HoldCommand, strconv.Itoa(fd), w.Program}, w.Argv...), Env: []string{"GOMAXPROCS=1", "GOGC=off"}, Dir: w.Dir}
	for _, kv := range w.Env {
		held.Env = append(held.Env, hidden+kv)
	}
	return held
}

// held is a message between a holder and Hold, the same as that of package sandbox.
type held struct {
	Ready bool     `json:"ready,omitempty"`
	Env   []string `json:"env,omitempty"`
	Begun bool     `json:"begun,omitempty"`
	Fault string   `json:"fault,omitempty"`
}

// Hold waits until its holder lets it go, and becomes the program. If the holder closes its socket,
// Hold ends this process. It never returns. The arguments are those of [Wanted.Held].
func Hold(args []string) {
	fd, err := -1, error(nil)
	if len(args) > 0 {
		fd, err = strconv.Atoi(args[0])
	}
	if err != nil || len(args) < 3 {
		os.Exit(fail(nil, fmt.Errorf("arguments %q, want a descriptor and a program", args)))
	}
	tellHolder := func(m held) error {
		b, err := json.Marshal(m)
		if err == nil {
			_, err = unix.Write(fd, b)
		}
		return err
	}
	if err := become(fd, args[1], args[2:], tellHolder); err != nil {
		_ = tellHolder(held{Fault: err.Error()}) // if the holder has gone, nobody reads it
		os.Exit(1)
	}
	os.Exit(0)
}

// become returns nil if the program is not needed any more.
func become(fd int, program string, argv []string, tellHolder func(held) error) error {
	unix.CloseOnExec(fd)
	if err := tellHolder(held{Ready: true}); err != nil {
		return nil //nolint:nilerr // the holder has gone
	}
	buf, n, err := make([]byte, maxSaid), 0, error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(fd, buf)
	}
	if err != nil || n == 0 {
		return nil //nolint:nilerr // as above
	}
	var m held
	if err := json.Unmarshal(buf[:n], &m); err != nil {
		return err
	}
	env := visible(os.Environ(), m.Env)
	if program == "" {
		if program, err = find(argv[0], env); err != nil {
			return err
		}
	}
	if err := tellHolder(held{Begun: true}); err != nil {
		return nil //nolint:nilerr // as above
	}
	return fmt.Errorf("exec %s: %w", program, syscall.Exec(program, argv, env))
}

// visible returns the variables of a program that has waited, from those of this process and those
// that it has got since.
func visible(environ, own []string) (out []string) {
	set := map[string]bool{}
	for _, kv := range own {
		name, _, _ := strings.Cut(kv, "=")
		set[name] = true
	}
	for _, kv := range environ {
		kv, theirs := strings.CutPrefix(kv, hidden)
		if name, _, _ := strings.Cut(kv, "="); theirs && !set[name] {
			out = append(out, kv)
		}
	}
	return append(out, own...)
}
