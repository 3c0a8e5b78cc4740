package provider

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Pinner keeps functions unchanged while they are measured.
type Pinner interface {
	// Pin runs a function in one replica with a given CPU limit until p.Until. The holder calls it
	// again to renew the pin. It returns the present state, or [ErrPinned] if another holder has
	// the function or if the function is in use.
	Pin(key pipeline.Key, p Pin) (Held, error)
	// Unpin ends the holder's pin, if there is one.
	Unpin(key pipeline.Key, holder string)
}

// ErrPinned means that a function cannot be pinned now: 409.
var ErrPinned = errors.New("cannot be pinned now")

// Pin is a lease on a function.
type Pin struct {
	Holder   string
	CPUMilli int // CPU limit of its replica in thousandths of a core; 0: as declared
	Until    time.Time
}

// Held is the present state of a [Pin].
type Held struct {
	// revision of the function; if it changes, earlier measurements are void.
	Revision uint64 `json:"revision"`
	Image    string `json:"image"`
	Digest   string `json:"digest,omitempty"`
	// declared CPU limit of a replica in thousandths of a core; 0: none.
	Limit   int    `json:"cpuLimit"`
	Replica string `json:"replica,omitempty"` // empty: no replica yet
	Node    string `json:"node,omitempty"`
	NodeCPU int    `json:"nodeCPU,omitempty"` // CPU of the node in thousandths of a core
	// The replica is ready, of this revision, and the only one.
	Ready     bool `json:"ready"`
	CPUMilli  int  `json:"cpuMilli"`            // present CPU limit; 0: as declared
	Unbounded bool `json:"unbounded,omitempty"` // the node cannot limit CPU
	Slots     int  `json:"slots"`               // concurrent batches
	Batch     int  `json:"batch"`               // largest batch
	Queue     int  `json:"queueLimit"`          // largest number of waiting calls
}

// profilePrefix begins the keys of profiles in the store. Functions' keys have no slash.
const profilePrefix = "profile/"

// profiled is a profile in the registry, together with its form for policies. It has no version if
// the stored profile is invalid.
type profiled struct {
	profile.Profile
	points []plan.Point
}

// Profile returns a function's profile. Stale means that the function's image has changed since.
func (r *Registry) Profile(key pipeline.Key) (profile.Profile, bool) {
	p, ok := r.profiles.Load(key)
	d, there := r.Function(key)
	if !ok || !there || p.(*profiled).Version == 0 {
		return profile.Profile{}, false
	}
	out := p.(*profiled).Profile
	out.Stale = !out.Of(d.Deployment.Image, d.Digest)
	return out, true
}

// Points returns a deployed function's profile in the form for policies. It returns nothing if
// there is no profile or if the profile is stale. It also returns nothing if the function shares a
// process, because the CPU of such a process is not limited. The result is shared and must not be
// changed.
func (r *Registry) Points(d *Deployed) []plan.Point {
	if p, ok := r.profiles.Load(d.Key); ok && d.Declared.Process == "" && p.(*profiled).Of(d.Deployment.Image, d.Digest) {
		return p.(*profiled).points
	}
	return nil
}

func (r *Registry) applyProfile(key pipeline.Key, e Entry) {
	if e.Deleted {
		r.profiles.Delete(key)
		return
	}
	p, err := profile.Decode(e.Value)
	if err != nil {
		r.log.Warn("a stored profile is left out", "function", key, "error", err)
		r.profiles.Store(key, &profiled{}) // an entry, so that it is removed with its function
		return
	}
	p.Function = key.String()
	r.profiles.Store(key, &profiled{p, p.Plan()})
}

func (p *Provider) showProfile(w http.ResponseWriter, r *http.Request) {
	d, err := p.find(r.PathValue("name"), "", r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	prof, ok := p.Registry.Profile(d.Key)
	if !ok {
		p.fail(w, r, refuse(http.StatusNotFound, fmt.Errorf("function %q has no profile; `stagecoach profile %s` measures one", d.Key, d.Declared.Name)))
		return
	}
	writeJSON(w, http.StatusOK, prof)
}

func (p *Provider) storeProfile(w http.ResponseWriter, r *http.Request) {
	var prof profile.Profile
	err := readJSON(w, r, &prof)
	if err == nil {
		err = prof.Validate()
	}
	if err == nil {
		err = p.changing(r.Context(), func(ctx context.Context) error { return p.putProfile(ctx, r, prof) })
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, "profile of "+r.PathValue("name"))
}

// putProfile stores a profile with its function. A profile without an image digest belongs to the
// present image.
func (p *Provider) putProfile(ctx context.Context, r *http.Request, prof profile.Profile) error {
	d, err := p.find(r.PathValue("name"), "", r)
	if err != nil {
		return err
	}
	if prof.Image == "" && prof.Digest == "" {
		prof.Image, prof.Digest = d.Deployment.Image, d.Digest
	}
	if !prof.Of(d.Deployment.Image, d.Digest) {
		return refuse(http.StatusConflict, fmt.Errorf("profile of image %s %s, want one of what function %q has now, which is %s %s",
			quote(prof.Image), quote(prof.Digest), d.Key, quote(d.Deployment.Image), quote(d.Digest)))
	}
	prof.Function, prof.Stale = d.Key.String(), false
	if prof.At.IsZero() {
		prof.At = time.Now().UTC()
	}
	prof.Sort()
	value, err := json.Marshal(prof)
	if err != nil {
		return fmt.Errorf("profile of %q: %w", d.Key, err)
	}
	rev, err := p.Store.Put(ctx, profilePrefix+d.Key.String(), value)
	if err != nil {
		return fmt.Errorf("profile of %q: %w", d.Key, err)
	}
	p.Log.Info("profile stored", "function", d.Key, "points", len(prof.Points))
	return p.Registry.wait(ctx, rev)
}

// dropProfile deletes the profile of a function that is about to be removed.
func (p *Provider) dropProfile(ctx context.Context, key pipeline.Key) error {
	if _, ok := p.Registry.profiles.Load(key); !ok {
		return nil
	}
	if err := p.Store.Delete(ctx, profilePrefix+key.String()); err != nil {
		return fmt.Errorf("profile of %q: %w", key, err)
	}
	return nil
}

// maxPin is the longest lease. A holder must renew it; otherwise it counts as gone.
const maxPin = time.Minute

// pinOrder is the body of PUT /system/function/NAME/pin.
type pinOrder struct {
	Holder   string  `json:"holder"`
	CPUMilli int     `json:"cpuMilli"`
	Seconds  float64 `json:"seconds"` // from now
}

// check reports every bad field.
func (o pinOrder) check() error {
	var errs []error
	bad := func(path, got, want string) {
		errs = append(errs, &pipeline.FieldError{Path: path, Got: got, Want: want})
	}
	if o.Holder == "" || len(o.Holder) > 64 {
		bad("holder", quote(o.Holder), "an identifier of the caller, of 1 to 64 bytes")
	}
	if o.CPUMilli != 0 && (o.CPUMilli < profile.MinCPU || o.CPUMilli > maxCPU) {
		bad("cpuMilli", strconv.Itoa(o.CPUMilli), fmt.Sprintf("0, for as declared, or %d to %d", profile.MinCPU, maxCPU))
	}
	if !(o.Seconds > 0 && o.Seconds <= maxPin.Seconds()) {
		bad("seconds", strconv.FormatFloat(o.Seconds, 'g', -1, 64), fmt.Sprintf("above 0 and at most %g", maxPin.Seconds()))
	}
	return errors.Join(errs...)
}

func (p *Provider) pin(w http.ResponseWriter, r *http.Request) {
	var o pinOrder
	err := readJSON(w, r, &o)
	if err == nil {
		err = o.check()
	}
	var d Deployed
	if err == nil {
		d, err = p.find(r.PathValue("name"), "", r)
	}
	var held Held
	if err == nil {
		held, err = p.Pinner.Pin(d.Key, Pin{o.Holder, o.CPUMilli, time.Now().Add(time.Duration(o.Seconds * float64(time.Second)))})
	}
	if errors.Is(err, ErrPinned) {
		err = refuse(http.StatusConflict, err)
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	held.Revision, held.Image, held.Digest = d.Revision, d.Deployment.Image, d.Digest
	held.Limit, held.Queue = d.Resources().CPULimit, d.Declared.QueueLimit
	writeJSON(w, http.StatusOK, held)
}

func (p *Provider) unpin(w http.ResponseWriter, r *http.Request) {
	d, err := p.find(r.PathValue("name"), "", r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	p.Pinner.Unpin(d.Key, r.URL.Query().Get("holder"))
	writeText(w, http.StatusOK, "not pinned: "+d.Key.String())
}
