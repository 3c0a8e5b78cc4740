package provider

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// deploy stores the deployment of a new function (POST), or of an existing one (PUT).
func (p *Provider) deploy(w http.ResponseWriter, r *http.Request) {
	d, err := p.readDeployment(w, r)
	if err == nil {
		err = p.changing(r.Context(), func(ctx context.Context) error { return p.store(ctx, d, r.Method == http.MethodPost) })
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	text := "deployed " + d.Key.String()
	if guess := d.guessed(); guess != "" {
		text += "\nguessed " + guess
	}
	writeText(w, http.StatusAccepted, text+missing(p.Registry, d.Declared))
}

func (p *Provider) store(ctx context.Context, d Deployed, isNew bool) error {
	// waits for a change whose request gave up.
	if err := p.Registry.wait(ctx, p.stored); err != nil {
		return fmt.Errorf("function %q is not deployed, try again: the deploy before it: %w", d.Key, err)
	}
	old, there := p.Registry.Function(d.Key)
	switch {
	case isNew && there:
		return refuse(http.StatusConflict, fmt.Errorf("function %q exists already, want a PUT to change it (faas-cli deploy without --update=false)", d.Key))
	case !isNew && !there:
		return refuse(http.StatusNotFound, fmt.Errorf("no function %q, want a POST to create it", d.Key))
	case there:
		d.CreatedAt = old.CreatedAt
		if keepsReplicas(&old, &d) {
			d.Replicas = old.Revision
		}
	}
	if err := p.checkNamesake(d.Declared); err != nil {
		return err
	}
	value, err := encode(d)
	if err != nil {
		return err
	}
	// checked here, where no other change can remove one.
	if errs := p.checkSecrets(d.Deployment); len(errs) > 0 {
		return errors.Join(errs...)
	}
	if err := p.checkProcess(d); err != nil {
		return err
	}
	stages := retainer{p.Store, p.Registry}
	if there {
		if err := stages.release(ctx, old, &d.Declared); err != nil {
			return err
		}
	}
	if err := p.Mounts.Mount(d.Declared.Namespace, d.Declared.Name, d.Deployment.Secrets); err != nil {
		return err
	}
	rev, err := p.Store.Put(ctx, d.Key.String(), value)
	if err != nil {
		err = fmt.Errorf("function %q: %w", d.Key, err)
		if !there {
			err = errors.Join(err, p.Mounts.Unmount(d.Declared.Namespace, d.Declared.Name))
		}
		return err
	}
	p.stored = rev
	p.Log.Info("deployed", "function", d.Key, "image", d.Deployment.Image, "revision", cmp.Or(d.Replicas, rev))
	if err := p.Registry.wait(ctx, rev); err != nil || !p.Registry.Retained(d.Key) {
		return err
	}
	return stages.drop(ctx, d.Key)
}

// checkNamesake refuses a function that would give a name two meanings. It refuses a function with
// the name of a pipeline, and a function that declares a pipeline with the name of a function. A
// stage of the pipeline may have the pipeline's name. The caller holds the token p.change.
func (p *Provider) checkNamesake(f pipeline.Function) error {
	const path = "annotations[" + `"` + pipeline.Prefix + `pipeline"]`
	var errs []error
	if stages := stagesOf(p.Registry.Functions(), f.Name, f.Namespace); !f.StageOf(f.Name) {
		if stages = slices.DeleteFunc(stages, func(s string) bool { return s == f.Name }); len(stages) > 0 {
			errs = append(errs, &pipeline.FieldError{
				Path: "service",
				Got:  fmt.Sprintf("%q, which is the name of a pipeline of namespace %q: %s of its stages (%s) declares it", f.Name, f.Namespace, path, some(stages)),
				Want: "a name that no pipeline of the namespace has, or this function as the entry stage of the pipeline",
			})
		}
	}
	for _, name := range f.Pipelines {
		if !f.StageOf(name) || name == f.Name {
			continue
		}
		if d, there := p.Registry.Function(pipeline.Key{Name: name, Namespace: f.Namespace}); there && !d.Declared.StageOf(name) {
			errs = append(errs, &pipeline.FieldError{
				Path: path,
				Got:  fmt.Sprintf("%q, which is the name of a function of namespace %q (its image is %s)", name, f.Namespace, quote(d.Deployment.Image)),
				Want: "a name that no function of the namespace has, or that function as the entry stage of the pipeline",
			})
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return refuse(http.StatusConflict, errors.Join(errs...))
}

func (p *Provider) remove(w http.ResponseWriter, r *http.Request) {
	var req types.DeleteFunctionRequest
	err := readJSON(w, r, &req)
	if err == nil {
		err = p.changing(r.Context(), func(ctx context.Context) error {
			d, err := p.find(req.FunctionName, req.Namespace, r)
			if err != nil {
				return err
			}
			return p.delete(ctx, d)
		})
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, "deleted "+req.FunctionName)
}

// delete removes a function. If it has variants, its declaration stays, so that they go on serving
// its stage. With the last of them the declaration goes, too.
func (p *Provider) delete(ctx context.Context, d Deployed) error {
	stages := retainer{p.Store, p.Registry}
	if err := stages.retain(ctx, d); err != nil {
		return err
	}
	// What was measured goes first, because a function without it is still valid.
	if err := errors.Join(p.dropProfile(ctx, d.Key), dropAccuracy(ctx, p.Store, p.Registry, &d)); err != nil {
		return err
	}
	if err := stages.release(ctx, d, nil); err != nil {
		return err
	}
	if err := p.Store.Delete(ctx, d.Key.String()); err != nil {
		return fmt.Errorf("function %q: %w", d.Key, err)
	}
	p.Log.Info("deleted", "function", d.Key)
	return errors.Join(p.Registry.waitGone(ctx, d.Key.String()), p.Mounts.Unmount(d.Declared.Namespace, d.Declared.Name))
}

func (p *Provider) scale(w http.ResponseWriter, r *http.Request) {
	var req scaleRequest
	err := readStrict(w, r, &req)
	if err == nil {
		err = p.scaleTo(r, req)
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, fmt.Sprintf("scaling to %d", *req.Replicas))
}

// scaleRequest is types.ScaleServiceRequest, but a missing number does not mean 0.
type scaleRequest struct {
	ServiceName string  `json:"serviceName"`
	Replicas    *uint64 `json:"replicas"`
	Namespace   string  `json:"namespace"`
}

func (p *Provider) scaleTo(r *http.Request, req scaleRequest) error {
	name := r.PathValue("name")
	if req.Replicas == nil {
		return &pipeline.FieldError{Path: "replicas", Got: "none", Want: "a number of replicas, 0 to stop all"}
	}
	replicas := *req.Replicas
	if req.ServiceName != "" && req.ServiceName != name {
		return &pipeline.FieldError{Path: "serviceName", Got: strconv.Quote(req.ServiceName), Want: strconv.Quote(name) + " as in the path"}
	}
	d, err := p.find(name, req.Namespace, r)
	if err != nil {
		return err
	}
	if most := d.Declared.Scale.Max; replicas > uint64(most) {
		return &pipeline.FieldError{
			Path: "replicas", Got: strconv.FormatUint(replicas, 10),
			Want: fmt.Sprintf("at most %d, the label com.openfaas.scale.max of %q", most, d.Key),
		}
	}
	if err := p.Scaler.Scale(r.Context(), d.Key, int(replicas)); err != nil {
		return fmt.Errorf("scale %q to %d: %w", d.Key, replicas, err)
	}
	return nil
}

// find returns the function that a request names. namespace comes from the request's body and wins
// over the query's.
func (p *Provider) find(name, namespace string, r *http.Request) (Deployed, error) {
	key := pipeline.Named(name, cmp.Or(namespace, r.URL.Query().Get("namespace")))
	if d, there := p.Registry.Function(key); there {
		return d, nil
	}
	return Deployed{}, p.Registry.NotFound("function", key)
}
