package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"
)

// prefix begins the IDs of namespaces, which plugins know as container IDs.
const prefix = "stagecoach-"

// records are the folders of namespaces, and libcni's cache.
type records struct {
	dir    string
	own    string // hash of the owner's name
	cached *libcni.CNIConfig
}

// begin records what is needed for the DEL of a namespace, before the ADD. It returns a path of the
// namespace, by which the namespace also stays when its processes have ended.
func (r records) begin(id string, ns *os.File, conf []byte) (at string, err error) {
	dir := filepath.Join(r.dir, id)
	//nolint:gosec // replicas' resolv.conf is read through it
	if err := os.Mkdir(dir, 0o711); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, "conflist"), conf, 0o600); err != nil {
		return "", err
	}
	at = filepath.Join(dir, "ns")
	if err := os.WriteFile(at, nil, 0o400); err != nil {
		return "", err
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), at, "", unix.MS_BIND, ""); err != nil {
		return "", fmt.Errorf("mount the namespace at %s: %w", at, err)
	}
	return at, nil
}

// namespace returns the name of an ID's namespace, as /proc has it; empty: it is not mounted.
func (r records) namespace(id string) string {
	at := filepath.Join(r.dir, id, "ns")
	var fsys unix.Statfs_t
	var st unix.Stat_t
	if unix.Statfs(at, &fsys) != nil || fsys.Type != unix.NSFS_MAGIC || unix.Stat(at, &st) != nil {
		return ""
	}
	return fmt.Sprintf("net:[%d]", st.Ino)
}

// end deletes what the plugins have made for a namespace, with the configuration of its ADD, and
// then the record.
func (r records) end(ctx context.Context, id string) error {
	dir := filepath.Join(r.dir, id)
	rt := &libcni.RuntimeConf{ContainerID: id, IfName: ifName}
	if r.namespace(id) != "" {
		rt.NetNS = filepath.Join(dir, "ns")
	}
	conf, err := os.ReadFile(filepath.Join(dir, "conflist"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	made, err := r.cached.GetCachedAttachments(id)
	if err != nil {
		return err
	}
	for _, a := range made {
		conf = a.Config
	}
	if len(conf) > 0 { // else its owner ended before the ADD
		list, err := libcni.NetworkConfFromBytes(conf)
		if err != nil {
			return err
		}
		if err := r.cached.DelNetworkList(ctx, list, rt); err != nil {
			return err
		}
	}
	if err := unix.Unmount(filepath.Join(dir, "ns"), unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s/ns: %w", dir, err)
	}
	return os.RemoveAll(dir)
}

// all returns the IDs of all owners.
func (r records) all() (out []string) {
	entries, _ := os.ReadDir(r.dir)                // made by open
	cached, _ := r.cached.GetCachedAttachments("") // those that are unreadable are nobody's
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	for _, a := range cached {
		if strings.HasPrefix(a.NetNS, r.dir+"/") { // else it belongs to another Run folder
			out = append(out, a.ContainerID)
		}
	}
	out = slices.DeleteFunc(out, func(id string) bool { return ownerOf(id) == "" })
	slices.Sort(out)
	return slices.Compact(out)
}

// ids returns the IDs of an owner.
func (r records) ids(owner string) []string {
	return slices.DeleteFunc(r.all(), func(id string) bool { return ownerOf(id) != owner })
}

// owners returns the owners of all IDs.
func (r records) owners() (out []string) {
	for _, id := range r.all() {
		out = append(out, ownerOf(id))
	}
	return slices.Compact(out)
}

// ownerOf returns the hash in an ID; empty: the ID is not ours.
func ownerOf(id string) string {
	rest, ours := strings.CutPrefix(id, prefix)
	owner, number, ok := strings.Cut(rest, "-")
	if !ours || !ok || len(owner) != 12 || len(number) != 12 || strings.ContainsAny(rest, "/.") {
		return ""
	}
	return owner
}

// lock locks an owner's IDs while the returned file is open.
func (r records) lock(owner string, patience time.Duration) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(r.dir, owner+".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			_ = f.Close() // nothing was written
			return nil, fmt.Errorf("%s: %w: end the other process of this state folder", f.Name(), err)
		}
	}
}
