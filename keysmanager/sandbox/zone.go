package sandbox

import (
	"bytes"
	"os"
	"strings"
)

// zoneFile is the machine's time zone: a file, or most often a link to one of /usr/share/zoneinfo.
const zoneFile = "/etc/localtime"

// zone is a time zone for a root.
type zone struct {
	Link string // to a file that the root may have; empty: none
	Data []byte // content of that file; empty: the machine has no time zone
}

// machineZone returns the machine's time zone.
func machineZone() zone {
	link, err := os.Readlink(zoneFile)
	if err != nil || !strings.HasPrefix(link, "/") {
		link = ""
	}
	b, _ := os.ReadFile(zoneFile) // most likely there is none
	return zone{link, b}
}

// set makes it the time zone of the root of the calling thread. The root takes writes. If its /etc
// is not a folder, it keeps its own.
func (z zone) set() {
	if len(z.Data) == 0 || z.is(zoneFile) {
		return
	}
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return
	}
	if err := os.Remove(zoneFile); err != nil && !os.IsNotExist(err) {
		return
	}
	if z.Link != "" && z.is(z.Link) {
		_ = os.Symlink(z.Link, zoneFile) // the root has no such file any more
		return
	}
	_ = os.WriteFile(zoneFile, z.Data, 0o644) // if the layer is full, the program's start says so
}

// is reports whether a file has the time zone. The file is the image's, and may be anything: a
// named pipe, or larger than the memory.
func (z zone) is(file string) bool {
	info, err := os.Stat(file)
	if err != nil || !info.Mode().IsRegular() || info.Size() != int64(len(z.Data)) {
		return false
	}
	b, err := os.ReadFile(file)
	return err == nil && bytes.Equal(b, z.Data)
}
