package warden

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// hasChildren tells whether a process has children that live: neither ended nor waiting to be reaped.
func hasChildren(pid int) bool {
	all, err := os.ReadDir("/proc")
	if err != nil {
		return true // who knows
	}
	for _, d := range all {
		if _, err := strconv.Atoi(d.Name()); err != nil {
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%s/stat", d.Name()))
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" ")) // the name before it may hold anything
		fields := strings.Fields(string(rest))
		if len(fields) > 1 && fields[1] == strconv.Itoa(pid) && fields[0] != "Z" && fields[0] != "X" {
			return true
		}
	}
	return false
}
