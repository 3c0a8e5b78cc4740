package warden

import (
	"bytes"
	"os"
	"strconv"
)

// parents returns the processes that have living children: children that have not ended and do not
// wait to be reaped.
func parents() (map[int]bool, error) {
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	out := map[int]bool{}
	for _, d := range all {
		if _, err := strconv.Atoi(d.Name()); err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + d.Name() + "/stat")
		if err != nil {
			continue // the process has ended
		}
		// The fields after the name are state, parent, … The name may contain any characters.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 2 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
			continue
		}
		if parent, err := strconv.Atoi(string(fields[1])); err == nil {
			out[parent] = true
		}
	}
	return out, nil
}
