package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/transfer"
	"github.com/stagecoach-serving/stagecoach/internal/flight"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// imageShare serves the images of a control plane to its nodes.
type imageShare struct {
	source node.ImageSource // for nodes of this machine
	server *transfer.Server
	packs  *packs
}

// shareImages serves the store of up to the nodes that join.
func shareImages(u *up) error {
	if !u.cfg.NATS.joining() {
		return nil
	}
	p := newPacks(u.images.folders, u.images.store)
	u.onClose(func() error { p.jobs.Close(); return nil })
	server := transfer.NewServer(transfer.ServerConfig{Store: u.images.store, Folder: p.digest, Fetch: u.images.fetchDigest(), Rate: int64(u.cfg.ImageRate), Log: u.log})
	address, stop, err := node.ServeImages(filepath.Join(u.cfg.State, "run", "images.sock"), u.log, server.ServeConn)
	if err != nil {
		return err
	}
	u.onClose(func() error { stop(); return nil })
	u.images.share = &imageShare{node.ImageSource{Address: address}, server, p}
	return nil
}

// packTimeout bounds how long packing a folder of images may take.
const packTimeout = 10 * time.Minute

// packs packs folders of images for nodes that do not have them. It is safe for concurrent use.
type packs struct {
	folders sandbox.Images
	store   *image.Store
	jobs    *flight.Group[string]

	mu    sync.Mutex
	known map[string]pack // by the name of the image
}

// pack is a folder that was packed.
type pack struct {
	content string // as sandbox.Image has it
	digest  string // of the image in the store
}

func newPacks(folders sandbox.Images, store *image.Store) *packs {
	return &packs{folders: folders, store: store, jobs: flight.New[string](), known: map[string]pack{}}
}

// digest returns the digest of the image that has the content of a folder now. It packs the folder
// if its content has changed.
func (p *packs) digest(ctx context.Context, name string) (string, error) {
	found, err := p.folders.Resolve(name)
	if err != nil {
		return "", fmt.Errorf("%w: %w", image.ErrNoImage, err)
	}
	content := found.Root + " " + found.Digest
	p.mu.Lock()
	last := p.known[name]
	p.mu.Unlock()
	if last.content == content && image.Has(p.store, last.digest) {
		return last.digest, nil
	}
	return p.jobs.Do(ctx, content, packTimeout, func(ctx context.Context) (string, error) {
		digest, err := image.PackFolder(ctx, p.store, found.Root, found.Stage)
		if err != nil {
			return "", err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.known[name] = pack{content, digest}
		return digest, nil
	})
}

// used returns the digests of the packed folders that images of these names are.
func (p *packs) used(names []string) (digests []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range names {
		if k, ok := p.known[name]; ok {
			digests = append(digests, k.digest)
		}
	}
	return digests
}

// imagesInUse returns the digests of the images that functions use, each once and sorted.
func imagesInUse(u *up) []string {
	var digests, folders []string
	for _, f := range u.registry.Functions() {
		if f.Digest != "" {
			digests = append(digests, f.Digest)
		} else {
			folders = append(folders, image.Familiar(f.Deployment.Image))
		}
	}
	if u.images.share != nil {
		digests = append(digests, u.images.share.packs.used(folders)...)
	}
	slices.Sort(digests)
	return slices.Compact(digests)
}

// neighbours is how many nodes an order names as sources of an image.
const neighbours = 3

// nodeSources tells daemons where they find images.
type nodeSources struct {
	self    node.Identity
	name    string           // of this process, for nodes on other machines
	control node.ImageSource // of this process, for nodes of this machine
	packs   *packs
	all     func() []node.Inventory // of the daemons that are heard
}

// of returns where a node can get images: other nodes that have one of them, in random order, and
// then the control plane.
func (s *nodeSources) of(to *node.Client, images ...string) (out node.Images) {
	if s == nil {
		return out
	}
	digests := s.packs.used(images)
	for _, i := range images {
		if d := digestIn(i); d != "" {
			digests = append(digests, d)
		}
	}
	far := to.Far()
	for _, inv := range s.all() {
		if inv.Name == to.Name() || !slices.ContainsFunc(digests, func(d string) bool { return slices.Contains(inv.Images, d) }) {
			continue
		}
		switch {
		case far && inv.Address != "":
			out.Sources = append(out.Sources, node.ImageSource{Node: inv.Name, Address: inv.Address})
		case !far && inv.Socket != "" && inv.Boot == s.self.Boot:
			out.Sources = append(out.Sources, inv.ImageSource())
		}
	}
	rand.Shuffle(len(out.Sources), func(i, j int) { out.Sources[i], out.Sources[j] = out.Sources[j], out.Sources[i] })
	out.Sources = out.Sources[:min(len(out.Sources), neighbours)]
	if far {
		out.Sources = append(out.Sources, node.ImageSource{Control: s.name})
	} else {
		out.Sources = append(out.Sources, s.control)
	}
	return out
}

// digestIn returns the digest in the name of a pinned image; empty: it is a folder.
func digestIn(name string) string {
	ref, err := image.ParseRef(name)
	if err != nil {
		return ""
	}
	return ref.Digest
}

// Warm implements cluster.Node.
func (n remoteNode) Warm(ctx context.Context, wanted []node.Wanted) error {
	images := make([]string, len(wanted))
	for i := range wanted {
		images[i] = wanted[i].Spec.Image
	}
	_, err := n.Client.Do(ctx, node.Order{Kind: node.OrderWarm, Wanted: wanted, Images: n.sources.of(n.Client, images...)})
	return err
}

// toldImages is what a daemon was told about the images that functions use.
type toldImages struct {
	daemon string // its id
	at     time.Time
}

// maxInUse bounds the list of images in use, because a message of NATS has at most 1 MiB. Nodes of
// a larger cluster are told nothing, and keep all images.
const maxInUse = 8192

// tellAgain is the pause before a daemon is told again after a failure.
const tellAgain = time.Minute

// tellImages tells a daemon which images functions use, unless it was told within collectEvery.
// Every announcement of the daemon calls it.
func (n *nodes) tellImages(c *node.Client, inUse func() []string) {
	id := c.Inventory().ID
	n.mu.Lock()
	defer n.mu.Unlock()
	if was := n.told[c.Name()]; was.daemon == id && time.Since(was.at) < collectEvery {
		return
	}
	n.told[c.Name()] = toldImages{id, time.Now()}
	n.group.Go(func() {
		ctx, cancel := context.WithTimeout(n.ctx, forgetTimeout)
		defer cancel()
		all := inUse()
		if len(all) > maxInUse {
			return
		}
		if _, err := c.Do(ctx, node.Order{Kind: node.OrderImages, Images: node.Images{InUse: all}}); err != nil {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.told[c.Name()] = toldImages{id, time.Now().Add(tellAgain - collectEvery)}
		}
	})
}

// nameOf returns the name of a source for logs and errors.
func nameOf(s node.ImageSource) string {
	if s.Node == "" {
		return "the control plane"
	}
	return fmt.Sprintf("node %q", s.Node)
}
