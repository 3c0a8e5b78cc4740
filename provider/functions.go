package provider

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// maxBody is the size in bytes that a request to the management API may have.
const maxBody = 1 << 20

// StatusAnnotation is where a described function says what its operator should know, such as why replicas do not start.
// It is made for the answer; a deploy that brings it along, copied from an answer, has it dropped.
const StatusAnnotation = pipeline.Prefix + "status"

// ReplicasAnnotation is where it says which replicas it has, on which nodes, and how long each took to start. It is made and
// dropped as [StatusAnnotation] is.
const ReplicasAnnotation = pipeline.Prefix + "replicas"

func (p *Provider) deploy(w http.ResponseWriter, r *http.Request) { p.put(w, r, true) }

func (p *Provider) update(w http.ResponseWriter, r *http.Request) { p.put(w, r, false) }

// put stores a deployment, of a function that is new or else of one that is there.
func (p *Provider) put(w http.ResponseWriter, r *http.Request, isNew bool) {
	d, err := p.readDeployment(w, r)
	if err == nil {
		err = p.changing(r.Context(), func(ctx context.Context) error { return p.store(ctx, d, isNew) })
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, "deployed "+d.Key)
}

func (p *Provider) store(ctx context.Context, d Deployed, isNew bool) error {
	old, there := p.Registry.Function(d.Key)
	switch {
	case isNew && there:
		return refuse(http.StatusConflict, fmt.Errorf("function %q is there already, want a PUT to change it (faas-cli deploy without --update=false)", d.Key))
	case !isNew && !there:
		return refuse(http.StatusNotFound, fmt.Errorf("no function %q, want a POST to create it", d.Key))
	case there:
		d.CreatedAt = old.CreatedAt
	}
	value, err := encode(d)
	if err != nil {
		return err
	}
	if errs := p.checkSecrets(d.Deployment); len(errs) > 0 { // here, where nobody removes one meanwhile
		return errors.Join(errs...)
	}
	if err := p.Mounts.Mount(d.Declared.Namespace, d.Declared.Name, d.Deployment.Secrets); err != nil {
		return err
	}
	rev, err := p.Store.Put(ctx, d.Key, value)
	if err != nil {
		return errors.Join(fmt.Errorf("function %q: %w", d.Key, err), p.Mounts.Mount(d.Declared.Namespace, d.Declared.Name, old.Deployment.Secrets))
	}
	p.Log.Info("deployed", "function", d.Key, "image", d.Deployment.Image, "revision", rev)
	return p.Registry.wait(ctx, rev)
}

// readDeployment reads and checks a deployment, and has its image brought here; errors name every bad field.
func (p *Provider) readDeployment(w http.ResponseWriter, r *http.Request) (Deployed, error) {
	var d types.FunctionDeployment
	if err := readJSON(w, r, &d); err != nil {
		return Deployed{}, err
	}
	d.Namespace = namespaceOf(d.Namespace, r)
	delete(deref(d.Annotations), StatusAnnotation)
	delete(deref(d.Annotations), ReplicasAnnotation)
	fn, err := parse(d)
	out := Deployed{Key: pipeline.Key(fn.Name, fn.Namespace), Deployment: d, Declared: fn, CreatedAt: time.Now().UTC()}
	err = errors.Join(err, p.check(d))
	if d.Image != "" {
		digest, bad := p.Images.Pin(r.Context(), d.Image)
		if bad != nil && !errors.Is(bad, ErrImages) {
			bad = &pipeline.FieldError{Path: "image", Got: strconv.Quote(d.Image), Want: "an image that can be run: " + bad.Error()}
		}
		out.Digest, err = digest, errors.Join(err, bad)
	}
	return out, err
}

// check looks at what package pipeline does not: the fields that are not labels and annotations.
func (p *Provider) check(d types.FunctionDeployment) error {
	var errs []error
	bad := func(path, got, want string) {
		errs = append(errs, &pipeline.FieldError{Path: path, Got: got, Want: want})
	}
	if d.Image == "" {
		bad("image", `""`, "the name of an image")
	}
	for _, name := range slices.Sorted(maps.Keys(d.EnvVars)) {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			bad("envVars", strconv.Quote(name), "a name without = and NUL")
		}
		if strings.Contains(d.EnvVars[name], "\x00") {
			bad("envVars."+name, "a value with NUL", "one without")
		}
	}
	if d.Service == "." || d.Service == ".." {
		bad("service", strconv.Quote(d.Service), "a name that can stand in a URL")
	}
	errs = append(errs, p.checkSecrets(d)...)
	errs = append(errs, checkResources("limits", d.Limits)...)
	errs = append(errs, checkResources("requests", d.Requests)...)
	errs = append(errs, checkRequests(d.Limits, d.Requests)...)
	return errors.Join(errs...)
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
			if err := p.dropProfile(ctx, d.Key); err != nil { // first: a function without its profile is whole
				return err
			}
			if err := p.Store.Delete(ctx, d.Key); err != nil {
				return fmt.Errorf("function %q: %w", d.Key, err)
			}
			p.Log.Info("deleted", "function", d.Key)
			return errors.Join(p.Registry.waitGone(ctx, d.Key), p.Mounts.Mount(d.Declared.Namespace, d.Declared.Name, nil))
		})
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, "deleted "+req.FunctionName)
}

func (p *Provider) list(w http.ResponseWriter, r *http.Request) {
	ns := namespaceOf("", r)
	out := []types.FunctionStatus{} // an empty list is [], not null
	for _, d := range p.Registry.Functions() {
		if d.Declared.Namespace == ns {
			out = append(out, p.show(d))
		}
	}
	writeJSON(w, http.StatusOK, out)
}

func (p *Provider) describe(w http.ResponseWriter, r *http.Request) {
	d, err := p.find(r.PathValue("name"), "", r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	out := p.show(&d)
	annotate(&out, ReplicasAnnotation, replicas(p.Status.Replicas(d.Key)))
	if usage, _ := strconv.ParseBool(r.URL.Query().Get("usage")); usage {
		if u, ok := p.Status.Usage(d.Key); ok {
			out.Usage = &types.FunctionUsage{CPU: u.CPUMilli, TotalMemoryBytes: u.MemoryBytes}
		}
	}
	writeJSON(w, http.StatusOK, out)
}

// show joins what was deployed and what runs.
func (p *Provider) show(d *Deployed) types.FunctionStatus {
	s, f := p.Status.State(d.Key), &d.Deployment
	out := types.FunctionStatus{
		Name: f.Service, Image: f.Image, Namespace: f.Namespace, EnvProcess: f.EnvProcess, EnvVars: f.EnvVars,
		Constraints: f.Constraints, Secrets: f.Secrets, Labels: f.Labels, Annotations: f.Annotations,
		Limits: f.Limits, Requests: f.Requests, ReadOnlyRootFilesystem: f.ReadOnlyRootFilesystem,
		InvocationCount: s.Invocations, Replicas: uint64(max(s.Replicas, 0)), AvailableReplicas: uint64(max(s.Available, 0)),
		CreatedAt: d.CreatedAt,
	}
	annotate(&out, StatusAnnotation, strings.Join(strings.Fields(s.Detail), " ")) // one line: faas-cli prints a table
	return out
}

// annotate adds an annotation to an answer, unless it says nothing.
func annotate(s *types.FunctionStatus, name, text string) {
	if text == "" {
		return
	}
	with := maps.Clone(deref(s.Annotations)) // which is the deployment's
	if with == nil {
		with = map[string]string{}
	}
	with[name] = text
	s.Annotations = &with
}

// replicas says in one line what runs where and how it came up.
func replicas(all []Replica) string {
	const most = 50
	var out []string
	for _, r := range all[:min(len(all), most)] {
		text := fmt.Sprintf("%s on %s: %s", r.Name, r.Node, r.State)
		if r.Hidden {
			text += ", its node is silent"
		}
		if r.Path != "" {
			text += ", " + r.Path
		}
		if r.Ready > 0 {
			text += fmt.Sprintf(", ready after %v", r.Ready.Round(100*time.Microsecond))
		}
		if len(r.Phases) > 0 {
			var phases []string
			for _, p := range r.Phases {
				phases = append(phases, fmt.Sprintf("%s %v", p.Name, p.Took.Round(100*time.Microsecond)))
			}
			text += " (" + strings.Join(phases, ", ") + ")"
		}
		if r.Answered > 0 {
			text += fmt.Sprintf(", first answer after %v", r.Answered.Round(100*time.Microsecond))
		}
		out = append(out, text)
	}
	if more := len(all) - most; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, "; ")
}

func (p *Provider) scale(w http.ResponseWriter, r *http.Request) {
	var req types.ScaleServiceRequest
	err := readJSON(w, r, &req)
	if err == nil {
		err = p.scaleTo(r, req)
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, fmt.Sprintf("scaling to %d", req.Replicas))
}

func (p *Provider) scaleTo(r *http.Request, req types.ScaleServiceRequest) error {
	name := r.PathValue("name")
	if req.ServiceName != "" && req.ServiceName != name {
		return &pipeline.FieldError{Path: "serviceName", Got: strconv.Quote(req.ServiceName), Want: strconv.Quote(name) + " as in the path"}
	}
	d, err := p.find(name, req.Namespace, r)
	if err != nil {
		return err
	}
	if most := d.Declared.Scale.Max; req.Replicas > uint64(most) {
		return &pipeline.FieldError{
			Path: "replicas", Got: strconv.FormatUint(req.Replicas, 10),
			Want: fmt.Sprintf("at most %d, the label com.openfaas.scale.max of %q", most, d.Key),
		}
	}
	if err := p.Scaler.Scale(r.Context(), d.Key, int(req.Replicas)); err != nil {
		return fmt.Errorf("scale %q to %d: %w", d.Key, req.Replicas, err)
	}
	return nil
}

// find looks a function up by its name and namespace, which may be in the body, in the query or a suffix of the name.
func (p *Provider) find(name, namespace string, r *http.Request) (Deployed, error) {
	explicit := cmp.Or(namespace, r.URL.Query().Get("namespace"))
	key, ok := pipeline.Key(name, explicit), explicit != ""
	if !ok {
		key, ok = p.Registry.Resolve(name)
	}
	if d, there := p.Registry.Function(key); ok && there {
		return d, nil
	}
	return Deployed{}, refuse(http.StatusNotFound, fmt.Errorf("no function %q in namespace %q", name, namespaceOf(namespace, r)))
}

// namespaceOf is the namespace of a request: in its body, else in its query, else the default.
func namespaceOf(body string, r *http.Request) string {
	return cmp.Or(body, r.URL.Query().Get("namespace"), DefaultNamespace)
}

// readJSON decodes a request's body, which must be one JSON value.
func readJSON(w http.ResponseWriter, r *http.Request, v any) error {
	return readJSONOf(w, r, v, maxBody)
}

// readJSONOf is readJSON of a body of at most that many bytes.
func readJSONOf(w http.ResponseWriter, r *http.Request, v any, most int64) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, most))
	err := d.Decode(v)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more than one JSON value")
		}
	}
	var wrong *json.UnmarshalTypeError
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &tooLarge):
		return fmt.Errorf("body: more than %d bytes: %w", most, err)
	case errors.As(err, &wrong):
		return &pipeline.FieldError{Path: cmp.Or(wrong.Field, "body"), Got: "a JSON " + wrong.Value, Want: wrong.Type.String()}
	default:
		return &pipeline.FieldError{Path: "body", Got: err.Error(), Want: "one JSON object"}
	}
}
