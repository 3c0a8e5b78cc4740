package pipeline

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Capabilities are the names of Linux's capabilities, without CAP_.
var Capabilities = strings.Fields(`AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN DAC_OVERRIDE
	DAC_READ_SEARCH FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN NET_BIND_SERVICE
	NET_BROADCAST NET_RAW PERFMON SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT SYS_CHROOT SYS_MODULE SYS_NICE SYS_PACCT
	SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM`)

// deviceForm is the form of CDI's names of devices.
var deviceForm = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?=[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?$`)

// className reads the name of a runtime class.
func (p *parser) className(v string) string {
	v = strings.TrimSpace(v)
	if !nameForm.MatchString(v) {
		p.fail(p.path, strconv.Quote(v), nameWant)
	}
	return v
}

// capabilities reads names of capabilities, with or without CAP_. ALL stands alone.
func (p *parser) capabilities(v string) []string {
	var out []string
	for part := range strings.SplitSeq(v, ",") {
		name := strings.TrimPrefix(strings.TrimSpace(part), "CAP_")
		switch {
		case name == "ALL" && !strings.Contains(v, ","):
			return []string{"ALL"}
		case name == "ALL":
			p.fail(p.path, strconv.Quote(v), "ALL alone, or names without it")
			return nil
		case !slices.Contains(Capabilities, name):
			p.fail(p.path, strconv.Quote(part), "ALL, or capabilities of Linux with commas between, such as NET_BIND_SERVICE,CHOWN")
		default:
			out = append(out, "CAP_"+name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// cdiDevices reads CDI's names of devices.
func (p *parser) cdiDevices(v string) []string {
	var out []string
	for part := range strings.SplitSeq(v, ",") {
		name := strings.TrimSpace(part)
		if !deviceForm.MatchString(name) {
			p.fail(p.path, strconv.Quote(part), "names of devices as CDI has them, vendor.com/class=name, with commas between")
			continue
		}
		if slices.Contains(out, name) {
			p.fail(p.path, strconv.Quote(v), fmt.Sprintf("each device once, %s is there twice", name))
			continue
		}
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}
