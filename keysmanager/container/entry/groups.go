package entry

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
)

// EnterGroups is the argument with which stagecoach-init is the hook of a container's runtime that
// moves the container's first process into cgroups. The next arguments are files named
// cgroup.procs.
const EnterGroups = "enter-groups"

// enterGroups is the hook. state is what a hook gets on standard input: see
// https://github.com/opencontainers/runtime-spec/blob/main/runtime.md#state
func enterGroups(state io.Reader, files []string) error {
	var s struct {
		PID int `json:"pid"`
	}
	if err := json.NewDecoder(state).Decode(&s); err != nil {
		return fmt.Errorf("state of the container: %w", err)
	}
	if s.PID <= 0 {
		return errors.New("state of the container: it has no pid")
	}
	for _, file := range files {
		if err := os.WriteFile(file, []byte(strconv.Itoa(s.PID)), 0); err != nil {
			return err
		}
	}
	return nil
}
