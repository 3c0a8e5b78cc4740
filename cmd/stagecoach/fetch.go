package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/transfer"
	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// nodeImages are the images of a daemon's node. It fetches those that orders need and the node
// lacks. It is safe for concurrent use.
type nodeImages struct {
	*images

	fetcher *transfer.Fetcher
	server  *transfer.Server
	dial    func(context.Context, node.ImageSource) (net.Conn, error)
	owner   string // of the note about used images
	log     *slog.Logger
	changed func() // is called when the list of images has changed

	ctx    context.Context // of fetches that nobody waits for
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu       sync.Mutex
	coming   map[string]bool // names that are fetched ahead of a start
	complete []string        // digests
	looked   time.Time       // when complete was read
	noted    time.Time       // when use was called
}

// newNodeImages returns the images of a node. The caller closes it before the store.
func newNodeImages(found *images, rate int64, owner string, log *slog.Logger) *nodeImages {
	n := &nodeImages{
		images: found, owner: owner, log: log, coming: map[string]bool{}, dial: node.DialImages, changed: func() {},
		fetcher: transfer.NewFetcher(transfer.FetcherConfig{Store: found.store, Log: log}),
		server:  transfer.NewServer(transfer.ServerConfig{Store: found.store, Rate: rate, Log: log}),
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.group.Go(func() { n.collectImages(n.ctx) })
	return n
}

// close ends the fetches and the collection.
func (n *nodeImages) close() {
	n.cancel()
	n.fetcher.Close()
	n.group.Wait()
}

// has reports whether a start of the image can begin without a fetch.
func (n *nodeImages) has(name string) bool {
	digest := digestIn(name)
	if digest == "" {
		return n.folders.Check(name) == nil
	}
	if n.contained != nil {
		return n.contained.Has(digest)
	}
	return image.Has(n.store, digest)
}

// runs reports whether the node can start from an image now, also from a folder that was fetched
// before.
func (n *nodeImages) runs(name string) bool {
	digest := digestIn(name)
	if digest == "" {
		digest = n.packed.get(name)
	}
	return n.has(name) || digest != "" && image.Has(n.store, digest)
}

// ensure returns when the node has an image and has unpacked it. fetched is false if the node had
// it before. If ctx ends first, the fetch goes on.
func (n *nodeImages) ensure(ctx context.Context, name string, from []node.ImageSource) (fetched bool, err error) {
	if n.has(name) || len(from) == 0 {
		return false, nil // without sources, the start says what is wrong
	}
	digest := digestIn(name)
	if digest == "" {
		if digest, err = n.folder(ctx, name, from); err != nil {
			return false, err
		}
		if image.Has(n.store, digest) {
			return false, nil
		}
	}
	if err := n.fetch(ctx, name, digest, from); err != nil {
		n.log.Warn("image is not on this node", "image", name, "error", err)
		return false, err
	}
	_, err = n.Resolve(name)
	n.forgetLook()
	n.changed()
	return true, err
}

// folder returns the digest of the image that a folder of the control plane is now.
func (n *nodeImages) folder(ctx context.Context, name string, from []node.ImageSource) (digest string, err error) {
	err = fmt.Errorf("image %q: the order names no control plane to ask for the folder", name)
	for _, s := range from {
		if s.Node != "" {
			continue
		}
		if digest, err = n.fetcher.Folder(ctx, name, n.peer(s)); err == nil {
			n.packed.set(name, digest)
			return digest, nil
		}
	}
	n.log.Warn("folder of images is not on this node, and cannot be fetched", "image", name, "error", err)
	return "", fmt.Errorf("%w; this node has no folder for it either", err)
}

func (n *nodeImages) peer(s node.ImageSource) transfer.Source {
	return transfer.Peer(nameOf(s), func(ctx context.Context) (net.Conn, error) { return n.dial(ctx, s) })
}

// fetch gets an image into the node's store. With containers, containerd imports it from there;
// what no process of the cluster has, containerd pulls from its registry.
func (n *nodeImages) fetch(ctx context.Context, name, digest string, from []node.ImageSource) error {
	var sources []transfer.Source
	for _, s := range from {
		sources = append(sources, n.peer(s))
	}
	ref, err := image.ParseRef(name)
	named := err == nil && ref.Host != "" && ref.Digest != ""
	if named && n.contained == nil {
		sources = append(sources, transfer.Registry(n.registry, ref.String()))
	}
	err = n.fetcher.Fetch(ctx, digest, sources)
	if err != nil && named && n.contained != nil && ctx.Err() == nil && !disk.IsFull(err) {
		n.log.Info("image is left to containerd", "image", name, "error", err)
		return nil
	}
	return err
}

// ahead fetches an image that no order waits for, unless it is being fetched.
func (n *nodeImages) ahead(name string, from []node.ImageSource) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.coming[name] || n.ctx.Err() != nil {
		return
	}
	n.coming[name] = true
	n.group.Go(func() {
		_, _ = n.ensure(n.ctx, name, from) // which logs the error; the next order tries again
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.coming, name)
	})
}

// lookAgain is how long the list of images is used before it is read again.
const lookAgain = 10 * time.Second

// list returns the digests for an announcement.
func (n *nodeImages) list() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if time.Since(n.looked) >= lookAgain {
		n.complete, n.looked = image.Complete(n.store, node.MaxImages), time.Now()
	}
	return n.complete
}

func (n *nodeImages) forgetLook() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.looked = time.Time{}
}

// use notes which images functions use.
func (n *nodeImages) use(ctx context.Context, digests []string) error {
	if err := image.NoteUsed(ctx, n.store, n.owner, digests); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.noted = time.Now()
	return nil
}

// clean removes the images that no function uses and that were not touched for idle, and returns
// how many bytes it has freed. It removes nothing unless the control plane has said within idle
// which images are in use: an image that is used since then was touched since then.
func (n *nodeImages) clean(ctx context.Context, idle time.Duration) (freed int64, err error) {
	n.mu.Lock()
	noted := n.noted
	n.mu.Unlock()
	if noted.IsZero() || time.Since(noted) >= idle {
		return 0, nil
	}
	used, _, err := image.Used(n.store, notesAge)
	if err != nil {
		return 0, err
	}
	defer n.forgetLook()
	return n.collect(ctx, used, idle)
}

// collectImages removes unused images from time to time, until ctx ends.
func (n *nodeImages) collectImages(ctx context.Context) {
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		freed, err := n.clean(ctx, collectAfter+collectEvery)
		if err != nil && ctx.Err() == nil {
			n.log.Warn("unused images are not removed", "error", err)
		}
		if freed > 0 {
			n.log.Info("removed unused images", "bytes", freed)
		}
	}
}

// packedFolders has the digests of folders that were fetched, by name.
type packedFolders struct {
	mu sync.Mutex
	by map[string]string
}

func (p *packedFolders) set(name, digest string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.by == nil {
		p.by = map[string]string{}
	}
	p.by[name] = digest
}

func (p *packedFolders) get(name string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.by[name]
}

// splitHosts reads a list of registries without TLS.
func splitHosts(list string) ([]string, error) {
	var out []string
	for host := range strings.SplitSeq(list, ",") {
		if ref, err := image.ParseRef(host + "/x"); err != nil || ref.Host != host || host == "" {
			return nil, errors.New("want hosts with a dot or a port, with commas between, such as 10.0.0.7:5000")
		}
		out = append(out, host)
	}
	return out, nil
}

// leastImageRate is the lowest rate at which transfers are not taken for stalled ones.
const leastImageRate = 1 << 20

func validImageRate(field string, rate Bytes, bad func(path string, got any, want string)) {
	if rate != 0 && rate < leastImageRate {
		bad(field, int64(rate), "at least 1Mi bytes per second, or 0 for no limit")
	}
}
