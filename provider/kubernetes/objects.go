package kubernetes

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

const (
	labelFunction = "faas_function" // as in OpenFaaS
	// markCluster is a label and an annotation with the identity of the cluster. If somebody
	// removes one of them, the other one still tells whose object it is.
	markCluster = pipeline.Prefix + "cluster"
	// specKey is the key of the function's deployment in its ConfigMap.
	specKey = "function.json"
)

// Pauses of Objects.
const (
	againAfter = 2 * time.Second // after an error, and before a look whether replicas have ended
	quietFor   = time.Minute     // between two logged errors of one object
)

// ObjectsConfig says which objects are derived. All fields are required.
type ObjectsConfig struct {
	Cluster    *kube.Client
	Namespaces []string // in which objects are made
	Identity   string   // of this cluster of control planes: a valid value of a label
	// Spec returns a function's deployment as JSON, and whether the function is deployed.
	Spec func(pipeline.Key) (text string, deployed bool)
	// Functions returns all deployed functions.
	Functions func() []pipeline.Key
	// Acts reports whether this process may change objects now. If not, it looks again later.
	Acts func() bool
	// Busy reports whether a removed function still has replicas.
	Busy func(pipeline.Key) bool
	Log  *slog.Logger
}

// Objects keeps a ConfigMap per function, with the function's name and deployment. The ConfigMap
// owns the function's pods, so Kubernetes deletes them if it is gone. Its methods are safe for
// concurrent use.
type Objects struct {
	cfg   ObjectsConfig
	pause time.Duration // againAfter

	mu      sync.Mutex
	due     map[pipeline.Key]time.Time // objects to look at, and when
	there   map[pipeline.Key]bool      // objects that exist
	logged  map[pipeline.Key]time.Time
	changed chan struct{} // closed when due or there changes
	running bool
}

// NewObjects returns Objects, which does nothing until [Objects.Run].
func NewObjects(cfg ObjectsConfig) *Objects {
	return &Objects{cfg: cfg, pause: againAfter, due: map[pipeline.Key]time.Time{}, there: map[pipeline.Key]bool{}, logged: map[pipeline.Key]time.Time{}, changed: make(chan struct{})}
}

// Selector returns the selector of a cluster's objects.
func Selector(identity string) string {
	return kube.LabelManaged + "=" + kube.Managed + "," + markCluster + "=" + identity
}

// Run keeps the objects until ctx ends. One process of the cluster may run it at a time.
func (o *Objects) Run(ctx context.Context) {
	o.mu.Lock()
	o.running = true
	o.mu.Unlock()
	var follows sync.WaitGroup
	for _, namespace := range o.cfg.Namespaces {
		follows.Go(func() {
			o.cfg.Cluster.Follow(ctx, kube.Objects{Resource: "configmaps", Namespace: namespace, Selector: Selector(o.cfg.Identity)}, kube.Follower{
				Listed: func(_ context.Context, all []kube.Meta) error { o.listed(namespace, all); return nil },
				Changed: func(_ context.Context, m kube.Meta, _ bool) error {
					o.look(pipeline.Key{Name: m.Name, Namespace: namespace})
					return nil
				},
				Failed: func(err error) {
					o.cfg.Log.Error("cannot watch functions' ConfigMaps; retrying", "namespace", namespace, "error", err)
				},
			})
		})
	}
	o.work(ctx)
	follows.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.running = false
	clear(o.due)
	clear(o.there)
}

// listed looks at all objects of a namespace, and at those that are missing.
func (o *Objects) listed(namespace string, all []kube.Meta) {
	for _, m := range all {
		o.look(pipeline.Key{Name: m.Name, Namespace: namespace})
	}
	for _, key := range o.cfg.Functions() {
		if key.Namespace == namespace {
			o.look(key)
		}
	}
}

// Deployed says that a function was deployed or removed.
func (o *Objects) Deployed(key pipeline.Key) {
	for _, namespace := range o.cfg.Namespaces {
		if key.Namespace == namespace {
			o.look(key)
		}
	}
}

// Await waits until a function that was just deployed has its object, or ctx ends. It does not wait
// in a process that does not run Objects, nor after an error.
func (o *Objects) Await(ctx context.Context, key pipeline.Key) {
	for {
		o.mu.Lock()
		at, waits := o.due[key]
		done, changed := !o.running || o.there[key] || !waits || at.After(time.Now()), o.changed
		o.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// look makes the object of a function due.
func (o *Objects) look(key pipeline.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.running {
		return
	}
	o.due[key] = time.Now()
	o.note()
}

// note wakes all that wait for a change. The caller holds o.mu.
func (o *Objects) note() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// work looks at due objects until ctx ends.
func (o *Objects) work(ctx context.Context) {
	for {
		key, wait, changed := o.next()
		if wait > 0 {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-time.After(wait):
			}
			continue
		}
		begun := time.Now()
		again, err := o.keep(ctx, key)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			o.report(key, err)
		}
		o.mu.Lock()
		switch at := o.due[key]; {
		case at.After(begun): // due again meanwhile
		case again || err != nil:
			o.due[key] = time.Now().Add(o.pause)
		default:
			delete(o.due, key)
		}
		o.note()
		o.mu.Unlock()
	}
}

// next returns an object that is due, or the time until one is.
func (o *Objects) next() (key pipeline.Key, wait time.Duration, changed <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	wait = time.Hour
	for k, at := range o.due {
		if left := time.Until(at); left < wait {
			key, wait = k, left
		}
	}
	return key, wait, o.changed
}

// report logs an error of an object, if none was logged lately.
func (o *Objects) report(key pipeline.Key, err error) {
	if now := time.Now(); now.Sub(o.logged[key]) >= quietFor { // only work uses it
		o.logged[key] = now
		o.cfg.Log.Error("cannot keep a function's ConfigMap; retrying", "function", key, "error", err)
	}
}

// keep makes, repairs or deletes the object of a function. again asks for another look later.
func (o *Objects) keep(ctx context.Context, key pipeline.Key) (again bool, err error) {
	if !o.cfg.Acts() {
		return true, nil
	}
	text, deployed := o.cfg.Spec(key)
	is, err := o.cfg.Cluster.ConfigMap(ctx, key.Namespace, key.Name)
	gone := kube.NotFound(err)
	if err != nil && !gone {
		return false, err
	}
	mine := !gone && o.mine(is.Metadata)
	o.mu.Lock()
	o.there[key] = deployed && mine
	if !deployed {
		delete(o.there, key)
		delete(o.logged, key)
	}
	o.mu.Unlock()
	switch {
	case gone && deployed:
		if err = o.create(ctx, key, text); kube.Conflict(err) {
			return true, nil
		}
		return false, err
	case gone, !mine && !deployed:
		return false, nil
	case !mine:
		return false, foreign(is)
	case is.Metadata.Deleted != "":
		return false, nil // the watch says when it is gone
	case deployed:
		return false, o.repair(ctx, key, is, text)
	case o.cfg.Busy(key): // the deletion would end its pods
		return true, nil
	}
	err = o.cfg.Cluster.DeleteConfigMap(ctx, key.Namespace, key.Name, is.Metadata.UID)
	if kube.Conflict(err) {
		return true, nil
	}
	return false, err
}

// foreign returns the error for a ConfigMap with a function's name that belongs to somebody else.
func foreign(is kube.ConfigMap) error {
	owner := "somebody else"
	if is.Metadata.Labels[kube.LabelManaged] == kube.Managed {
		owner = fmt.Sprintf("another installation (label %s=%s)", markCluster, is.Metadata.Labels[markCluster])
	}
	return fmt.Errorf("ConfigMap %q of namespace %q belongs to %s: delete it if nobody needs it, or deploy the function under another name",
		is.Metadata.Name, is.Metadata.Namespace, owner)
}

// mine reports whether an object belongs to this cluster.
func (o *Objects) mine(m kube.Meta) bool {
	label, ok := m.Labels[markCluster]
	annotation, marked := m.Annotations[markCluster]
	return ok && label == o.cfg.Identity && m.Labels[kube.LabelManaged] == kube.Managed || marked && annotation == o.cfg.Identity
}

// meta returns what an object is marked with.
func (o *Objects) meta(key pipeline.Key) kube.Meta {
	return kube.Meta{
		Name: key.Name, Namespace: key.Namespace, Annotations: map[string]string{markCluster: o.cfg.Identity},
		Labels: map[string]string{labelFunction: key.Name, kube.LabelManaged: kube.Managed, markCluster: o.cfg.Identity},
	}
}

func (o *Objects) create(ctx context.Context, key pipeline.Key, text string) error {
	_, err := o.cfg.Cluster.CreateConfigMap(ctx, kube.ConfigMap{Metadata: o.meta(key), Data: map[string]string{specKey: text}})
	if err == nil {
		o.mu.Lock()
		o.there[key] = true
		o.mu.Unlock()
		o.cfg.Log.Info("the function's ConfigMap is made", "function", key)
	}
	return err
}

// repair makes an object what it has to be, if somebody has changed it, or the function was
// deployed again.
func (o *Objects) repair(ctx context.Context, key pipeline.Key, is kube.ConfigMap, text string) error {
	want := o.meta(key)
	if len(is.Data) == 1 && is.Data[specKey] == text && len(is.Binary) == 0 && len(is.Metadata.Owners) == 0 &&
		includes(is.Metadata.Labels, want.Labels) && includes(is.Metadata.Annotations, want.Annotations) {
		return nil
	}
	data := map[string]any{}
	for name := range is.Data {
		data[name] = nil
	}
	data[specKey] = text
	err := o.cfg.Cluster.PatchConfigMap(ctx, key.Namespace, key.Name, map[string]any{
		"data": data, "binaryData": nil, "metadata": map[string]any{"labels": want.Labels, "annotations": want.Annotations, "ownerReferences": nil},
	})
	if kube.Invalid(err) { // somebody has made it immutable
		o.cfg.Log.Warn("the function's ConfigMap is made again; its pods start again", "function", key, "error", err)
		return o.cfg.Cluster.DeleteConfigMap(ctx, key.Namespace, key.Name, is.Metadata.UID)
	}
	if err == nil {
		o.cfg.Log.Info("the function's ConfigMap is repaired", "function", key)
	}
	return err
}

// includes reports whether all has each of some.
func includes(all, some map[string]string) bool {
	for name, value := range some {
		if have, ok := all[name]; !ok || have != value {
			return false
		}
	}
	return true
}
