package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// sliceBits is the size of the slices of a large network, with 4093 replicas each.
const sliceBits = 20

// label marks the gateways' addresses on the loopback link.
const label = "lo:" + prefix

// registry is a folder that all Stagecoach processes of a machine share. It is emptied when the
// machine starts.
//
//	networks/lock       is locked while a process opens or closes
//	networks/addresses  a process locks byte N while it has address N
//	networks/forward    exists while IP forwarding is on because of Stagecoach
//	networks/BASE_BITS  folder of a slice
type registry struct {
	dir       string
	addresses *os.File
	patience  time.Duration // for processes that have the lock
}

// lockPatience bounds the wait for the lock. Each process that opens or closes networks holds the
// lock for about 100 ms.
const lockPatience = 30 * time.Second

// openRegistry opens the folder, and creates it if it is missing.
func openRegistry(run string) (*registry, error) {
	dir := filepath.Join(run, "networks")
	for _, d := range []string{run, dir} {
		if err := ownFolder(d); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(filepath.Join(dir, "addresses"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	return &registry{dir: dir, addresses: f, patience: lockPatience}, nil
}

func (r *registry) close() { _ = r.addresses.Close() } // nothing was written

// ownFolder creates a folder that all users can enter and only this user can change.
func ownFolder(dir string) error {
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s: %v of user %d, want a folder that only user %d can change: remove it", dir, info.Mode(), st.Uid, os.Geteuid())
	}
	return os.Chmod(dir, 0o711) //nolint:gosec // replicas' files are read through it
}

// alone runs f while no other process of the machine opens or closes networks.
func (r *registry) alone(f func() error) error {
	lock, err := os.OpenFile(filepath.Join(r.dir, "lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close() // which unlocks it
	for deadline := time.Now().Add(r.patience); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f()
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%s: %w", lock.Name(), err)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: another Stagecoach process has had this lock for %v: end that process (`fuser -v %s` shows it)", lock.Name(), r.patience, lock.Name())
		}
	}
}

func (r *registry) flock(slice netip.Prefix, kind int16) *unix.Flock_t {
	return &unix.Flock_t{Type: kind, Start: int64(number(slice.Addr())), Len: 1 << (32 - slice.Bits())}
}

// reserved reports whether another process has addresses of a slice.
func (r *registry) reserved(slice netip.Prefix) (bool, error) {
	l := r.flock(slice, unix.F_WRLCK)
	if err := unix.FcntlFlock(r.addresses.Fd(), unix.F_OFD_GETLK, l); err != nil {
		return false, fmt.Errorf("%s: %w", r.addresses.Name(), err)
	}
	return l.Type != unix.F_UNLCK, nil
}

// reserve reserves the addresses of a slice that is not reserved.
func (r *registry) reserve(slice netip.Prefix) error {
	if err := unix.FcntlFlock(r.addresses.Fd(), unix.F_OFD_SETLK, r.flock(slice, unix.F_WRLCK)); err != nil {
		return fmt.Errorf("%s: reserve %v: %w", r.addresses.Name(), slice, err)
	}
	return nil
}

// folderName returns the name of a slice's folder, which is part of its table's name too.
func folderName(slice netip.Prefix) string {
	return slice.Addr().String() + "_" + strconv.Itoa(slice.Bits())
}

// folderSlice is the inverse of folderName.
func folderSlice(name string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(strings.Replace(name, "_", "/", 1))
	return p, err == nil && p.Addr().Is4() && p == p.Masked() && folderName(p) == name && validSlice(p.Bits())
}

// validSlice reports whether slices can have this size. The names of a slice's links must share a
// start that no link of another slice has.
func validSlice(bits int) bool { return bits == sliceBits || bits == 24 || bits == 28 }

func (r *registry) folder(slice netip.Prefix) string { return filepath.Join(r.dir, folderName(slice)) }

// ownerVersion is that of the file with a slice's owner.
const ownerVersion = 1

type ownerFile struct {
	Version int    `json:"version"`
	Owner   string `json:"owner"`
}

// owner returns the last owner of a slice, or "" if there was none.
func (r *registry) owner(slice netip.Prefix) (string, error) {
	name := filepath.Join(r.folder(slice), "owner")
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var f ownerFile
	if err := json.Unmarshal(b, &f); err != nil {
		return "", fmt.Errorf("%s: %w: remove it", name, err)
	}
	if f.Version != ownerVersion {
		return "", fmt.Errorf("%s: version %d, want %d", name, f.Version, ownerVersion)
	}
	return f.Owner, nil
}

func (r *registry) setOwner(slice netip.Prefix, owner string) error {
	if err := ownFolder(r.folder(slice)); err != nil {
		return err
	}
	b, err := json.Marshal(ownerFile{Version: ownerVersion, Owner: owner})
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(r.folder(slice), "owner"), append(b, '\n'), 0o600)
}

// replaceFile replaces a file atomically.
func replaceFile(name string, b []byte, mode fs.FileMode) error {
	if err := os.WriteFile(name+".new", b, mode); err != nil {
		return err
	}
	if err := os.Chmod(name+".new", mode); err != nil { // whatever the umask is
		return err
	}
	return os.Rename(name+".new", name)
}

// folders lists the slices that have a folder.
func (r *registry) folders() ([]netip.Prefix, error) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, e := range entries {
		if p, ok := folderSlice(e.Name()); ok {
			out = append(out, p)
		}
	}
	return out, nil
}

// machine describes the machine's network.
type machine struct {
	replicas []netip.Addr            // that have links
	foreign  map[netip.Prefix]string // addresses and routes of others: what they are
	mtu      int                     // of the default route's link; 0: there is none
}

// look reads the machine's links, addresses and routes.
func look(h *netlink.Handle) (*machine, error) {
	m := &machine{foreign: map[netip.Prefix]string{}}
	links, err := dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("links: %w", err)
	}
	byIndex := map[int]*netlink.LinkAttrs{}
	for _, l := range links {
		byIndex[l.Attrs().Index] = l.Attrs()
		if a, ok := linkAddr(l.Attrs().Name); ok {
			m.replicas = append(m.replicas, a)
		}
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addrs {
		p, ok := toPrefix(a.IPNet.IP, a.Mask)
		if !ok {
			continue
		}
		if a.Label != label { // that of a slice, which is reserved as a whole
			m.foreign[p.Masked()] = fmt.Sprintf("address %v of %s", p, nameOf(byIndex[a.LinkIndex]))
		}
	}
	routes, err := dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	for _, r := range routes {
		l := byIndex[r.LinkIndex]
		if r.Dst == nil || r.Dst.IP.IsUnspecified() {
			if l != nil && m.mtu == 0 && r.Table == unix.RT_TABLE_MAIN {
				m.mtu = l.MTU
			}
			continue
		}
		// Routes over replicas' links are ours. Routes of the local table follow from addresses.
		if _, ours := linkAddr(nameOf(l)); ours || r.Table == unix.RT_TABLE_LOCAL {
			continue
		}
		p, ok := toPrefix(r.Dst.IP, r.Dst.Mask)
		// A larger network than /8 is a part of a default route that was split.
		if _, known := m.foreign[p.Masked()]; ok && !known && p.Bits() >= 8 {
			m.foreign[p.Masked()] = fmt.Sprintf("route to %v by %s", p, nameOf(l))
		}
	}
	return m, nil
}

// dump reads a list from the kernel, again if it changed meanwhile.
func dump[T any](list func() ([]T, error)) (out []T, err error) {
	for range 100 {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return nil, err
}

func nameOf(l *netlink.LinkAttrs) string {
	if l == nil {
		return "no link"
	}
	return l.Name
}

func toPrefix(ip []byte, mask []byte) (netip.Prefix, bool) {
	a, ok := netip.AddrFromSlice(ip)
	ones := 0
	for _, b := range mask {
		for ; b != 0; b <<= 1 {
			ones++
		}
	}
	return netip.PrefixFrom(a.Unmap(), ones), ok
}

// living reports whether a slice has replicas.
func (m *machine) living(slice netip.Prefix) bool {
	return slices.ContainsFunc(m.replicas, slice.Contains)
}

// overlap describes what part of the machine's network is in a slice, or "".
func (m *machine) overlap(slice netip.Prefix) string {
	var all []string
	for p, what := range m.foreign {
		if p.Overlaps(slice) {
			all = append(all, what)
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// divide returns an iterator over the slices of a network.
func divide(cidr netip.Prefix) func(yield func(netip.Prefix) bool) {
	bits := max(sliceBits, cidr.Bits())
	return func(yield func(netip.Prefix) bool) {
		for i := range 1 << (bits - cidr.Bits()) {
			if !yield(netip.PrefixFrom(offset(cidr.Addr(), uint32(i)<<(32-bits)), bits)) {
				return
			}
		}
	}
}
