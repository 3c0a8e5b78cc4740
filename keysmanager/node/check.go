package node

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// Bounds of what an announcement may say. They are far above those of real machines.
const (
	maxBytes     = int64(1) << 50 // of a node's memory
	maxDevice    = int64(1) << 44 // bytes of a device's memory
	maxMilli     = 1_000_000_000  // thousandths of a core
	maxListed    = 16384          // replicas, failures, containers, or spares of a node
	maxZygotes   = 4096
	maxDevices   = 1024
	maxInventory = 4 << 20 // bytes of an announcement
	maxText      = 4096    // bytes of a function's name or a digest
	boundByFlag  = "--memory"
	// A driver may use memory beyond the size that the device reports: one part in deviceMargin of it.
	deviceMargin = 8
)

// check returns what no honest daemon would say, or nil. Sizes that do not fit together would make
// policies place replicas where there is no room.
func (inv *Inventory) check() error {
	c := checker{}
	c.counts(inv)
	if len(c.errs) == 0 { // the lists are short enough to look at
		c.memory(inv.Memory)
		c.number("cpu.total", int64(inv.CPU.Total), maxMilli)
		c.number("cpu.used", int64(inv.CPU.Used), maxMilli)
		c.number("items", inv.Items, maxBytes)
		c.devices(inv.Devices)
		c.zygotes(inv.Zygotes)
		c.replicas(inv.Replicas)
	}
	return errors.Join(c.errs...)
}

// checkerErrors bounds the errors of an announcement that are reported.
const checkerErrors = 4

type checker struct{ errs []error }

func (c *checker) add(format string, args ...any) {
	if len(c.errs) < checkerErrors {
		c.errs = append(c.errs, fmt.Errorf(format, args...))
	}
}

func (c *checker) number(field string, got, most int64) {
	if got < 0 || got > most {
		c.add("%s: %d, want 0 to %d", field, got, most)
	}
}

func (c *checker) text(field, got string, most int) {
	if len(got) > most {
		c.add("%s: %d bytes, want at most %d", field, len(got), most)
	}
}

func (c *checker) counts(inv *Inventory) {
	for _, l := range []struct {
		field     string
		got, most int
	}{
		{"devices", len(inv.Devices), maxDevices},
		{"zygotes", len(inv.Zygotes), maxZygotes},
		{"failures", len(inv.Failures), maxListed},
		{"replicas", len(inv.Replicas), maxListed},
		{"containers", len(inv.Containers), maxListed},
		{"spares", len(inv.Spares), maxListed},
		{"knows", len(inv.Knows), maxFeatures},
	} {
		if l.got > l.most {
			c.add("%s: %d, want at most %d", l.field, l.got, l.most)
		}
	}
}

func (c *checker) memory(m Memory) {
	c.number("memory.total", m.Total, maxBytes)
	c.number("memory.threshold", m.Threshold, m.Total)
	c.number("memory.free", m.Free, m.Total)
	most := m.Total
	if m.Bound == boundByFlag { // nothing keeps replicas from using more than the flag says
		most = maxBytes
	}
	c.number("memory.used", m.Used, most)
}

func (c *checker) devices(all []Device) {
	seen := map[string]bool{}
	for i := range all {
		d := &all[i]
		field := fmt.Sprintf("devices[%d].", i)
		if d.UUID == "" || len(d.UUID) > maxName || strings.ContainsAny(d.UUID, ", \t\r\n") {
			c.add("%suuid: %.100q, want a name without spaces and commas", field, d.UUID)
		}
		if seen[d.UUID] {
			c.add("%suuid: %.100q is there twice", field, d.UUID)
		}
		seen[d.UUID] = true
		c.number(field+"memory", d.Memory, maxDevice)
		c.number(field+"used", d.Used, d.Memory+d.Memory/deviceMargin)
		c.number(field+"free", d.Free, d.Memory)
		c.number(field+"reserved", d.Reserved, maxDevice)
		c.number(field+"parked", d.Parked, maxDevice)
		if math.IsNaN(d.Utilisation) || d.Utilisation > 1 {
			c.add("%sutilisation: %v, want at most 1", field, d.Utilisation)
		}
		if math.IsNaN(d.Power) || d.Power < 0 {
			c.add("%spower: %v, want 0 or more", field, d.Power)
		}
	}
}

func (c *checker) zygotes(all []Zygote) {
	for i := range all {
		z := &all[i]
		field := fmt.Sprintf("zygotes[%d].", i)
		c.number(field+"bytes", z.Bytes, maxBytes)
		c.number(field+"replicas", int64(z.Replicas), maxListed)
		c.text(field+"function", z.Function, maxText)
		c.text(field+"digest", z.Digest, maxText)
	}
}

func (c *checker) replicas(all []Replica) {
	seen := make(map[string]bool, len(all))
	for i := range all {
		r := &all[i]
		field := fmt.Sprintf("replicas[%d].", i)
		if err := isName(field+"name", r.Name); err != nil {
			c.add("%w", err)
		}
		if seen[r.Name] {
			c.add("%sname: %q is there twice", field, r.Name)
		}
		seen[r.Name] = true
		c.number(field+"cpuMilli", int64(r.CPUMilli), maxMilli)
		c.text(field+"function", r.Function, maxText)
	}
}
