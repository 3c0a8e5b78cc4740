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
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// maxBody is the size in bytes that a request to the management API may have.
const maxBody = 1 << 20

// maxVariable is the size in bytes that a variable of the environment may have, as NAME=VALUE: Linux's MAX_ARG_STRLEN without
// the NUL at its end. With a larger one no process can be started.
const maxVariable = 128<<10 - 1

// StatusAnnotation holds the status of the deployed revision in an answer: ready, updating, failing
// or asleep, then details after a colon, such as why replicas do not start. A deploy ignores it,
// because it may be copied from an answer.
const StatusAnnotation = pipeline.Prefix + "status"

// ReplicasAnnotation is where it says which replicas it has, on which nodes, and how long each took to start. It is made and
// dropped as [StatusAnnotation] is.
const ReplicasAnnotation = pipeline.Prefix + "replicas"

// GuessAnnotation is the annotation that says which process was guessed, and why, if the deployment
// names none. It is made and dropped like [StatusAnnotation].
const GuessAnnotation = pipeline.Prefix + "guessed-process"

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
	text := "deployed " + d.Key.String()
	if guess := d.guessed(); guess != "" {
		text += "\nguessed " + guess
	}
	writeText(w, http.StatusAccepted, text+p.missing(d.Declared))
}

func (p *Provider) store(ctx context.Context, d Deployed, isNew bool) error {
	if err := p.Registry.wait(ctx, p.stored); err != nil { // of a change whose request gave up
		return fmt.Errorf("function %q is not deployed, try again: of the deploy before it, %w", d.Key, err)
	}
	old, there := p.Registry.Function(d.Key)
	switch {
	case isNew && there:
		return refuse(http.StatusConflict, fmt.Errorf("function %q is there already, want a PUT to change it (faas-cli deploy without --update=false)", d.Key))
	case !isNew && !there:
		return refuse(http.StatusNotFound, fmt.Errorf("no function %q, want a POST to create it", d.Key))
	case there:
		d.CreatedAt = old.CreatedAt
	}
	if err := p.checkNamesake(d.Declared); err != nil {
		return err
	}
	value, err := encode(d)
	if err != nil {
		return err
	}
	if errs := p.checkSecrets(d.Deployment); len(errs) > 0 { // here, where nobody removes one meanwhile
		return errors.Join(errs...)
	}
	if err := p.checkProcess(d); err != nil {
		return err
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
	p.Log.Info("deployed", "function", d.Key, "image", d.Deployment.Image, "revision", rev)
	return p.Registry.wait(ctx, rev)
}

// checkNamesake refuses a function that has the name of a pipeline, and one that declares a pipeline with the name of a function:
// the name would have two meanings. The exception is a function that is a stage of the pipeline of its name. The caller holds the
// right to change.
func (p *Provider) checkNamesake(f pipeline.Function) error {
	const path = "annotations[" + `"` + pipeline.Prefix + `pipeline"]`
	var errs []error
	if stages := p.Registry.stagesOf(f.Name, f.Namespace); !f.StageOf(f.Name) {
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

// readDeployment reads and checks a deployment, and has its image brought here; errors name every bad field.
func (p *Provider) readDeployment(w http.ResponseWriter, r *http.Request) (Deployed, error) {
	var d types.FunctionDeployment
	if err := readJSON(w, r, &d); err != nil {
		return Deployed{}, err
	}
	d.Namespace = namespaceOf(d.Namespace, r)
	delete(deref(d.Annotations), StatusAnnotation)
	delete(deref(d.Annotations), ReplicasAnnotation)
	delete(deref(d.Annotations), GuessAnnotation)
	delete(deref(d.Annotations), FailureAnnotation)
	fn, err := parse(d, pipeline.Parse)
	out := Deployed{Key: fn.Key(), Deployment: d, Declared: fn, CreatedAt: time.Now().UTC()}
	err = errors.Join(err, p.check(d))
	if err == nil {
		err = p.checkRoom(&out)
	}
	if d.Image != "" {
		digest, bad := p.Images.Pin(r.Context(), d.Image)
		if bad != nil && !errors.Is(bad, ErrImages) {
			bad = &pipeline.FieldError{Path: "image", Got: strconv.Quote(d.Image), Want: "an image that can be run: " + bad.Error()}
		}
		out.Digest, err = digest, errors.Join(err, bad)
		if bad == nil {
			err = errors.Join(err, p.checkMode(d, digest))
		}
	}
	if err == nil && out.Digest == "" && namesNoProcess(d) {
		if out.Guess, err = p.Images.Guess(d.Image); err != nil {
			err = &pipeline.FieldError{Path: "envProcess", Got: "none, and image " + quote(d.Image) + ": " + err.Error(), Want: "the command to run, as fprocess in the stack file (faas-cli deploy --fprocess)"}
		}
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
	const network = pipeline.Prefix + "network"
	if deref(d.Annotations)[network] == pipeline.NetworkHost && !p.HostNetwork {
		bad(fmt.Sprintf("annotations[%q]", network), `"host"`, "default or none: the operator allows no function the machine's network (up --allow-host-network)")
	}
	for _, name := range slices.Sorted(maps.Keys(d.EnvVars)) {
		value := d.EnvVars[name]
		switch n := len(name) + len("=") + len(value); {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			bad("envVars", quote(name), "a name without = and NUL")
		case n > maxVariable:
			bad("envVars", fmt.Sprintf("%s of %d bytes with its name", quote(name), n), fmt.Sprintf("at most %d, because Linux passes no larger one to a process", maxVariable))
		case strings.Contains(value, "\x00"):
			bad("envVars."+name, "a value with NUL", "one without")
		case name == wire.EnvModel && value != "" && !filepath.IsLocal(value):
			bad("envVars."+name, quote(value), "a path inside the image, from its root, such as model/model.onnx")
		}
	}
	const most = maxVariable - len("fprocess=")
	switch n := len(d.EnvProcess); {
	case n > most:
		bad("envProcess", fmt.Sprintf("%d bytes", n), fmt.Sprintf("at most %d, because Linux passes no larger one to a process", most))
	case strings.Contains(d.EnvProcess, "\x00"):
		bad("envProcess", "a value with NUL", "one without")
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
			if err := p.Store.Delete(ctx, d.Key.String()); err != nil {
				return fmt.Errorf("function %q: %w", d.Key, err)
			}
			p.Log.Info("deleted", "function", d.Key)
			return errors.Join(p.Registry.waitGone(ctx, d.Key.String()), p.Mounts.Unmount(d.Declared.Namespace, d.Declared.Name))
		})
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, "deleted "+req.FunctionName)
}

func (p *Provider) list(w http.ResponseWriter, r *http.Request) {
	ns, err := p.queried(r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
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
	annotate(&out, FailureAnnotation, p.lastFailure(r.Context(), d.Key))
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
	annotate(&out, StatusAnnotation, oneLine(s.Status)) // faas-cli prints a table
	annotate(&out, GuessAnnotation, d.guessed())
	return out
}

// guessed returns one line that says which process was guessed, why, and how it runs; empty: none
// was guessed.
func (d *Deployed) guessed() string {
	if d.Guess.Process == "" {
		return ""
	}
	how := "once per request (environment mode: http runs it as a server)"
	switch mode := d.Deployment.EnvVars["mode"]; {
	case mode != "":
		how = "in mode " + mode
	case d.Guess.HTTP:
		how = "as a server (environment mode: streaming runs it once per request)"
	}
	return fmt.Sprintf("fprocess: %s, because %s; runs %s", d.Guess.Process, d.Guess.Why, how)
}

// oneLine returns text, such as a program's last words, as one line.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

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
		if r.Older {
			text += ", of an older revision"
		}
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

// scaleRequest is types.ScaleServiceRequest where a number that is not there is not taken for 0.
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

// find looks up the function that a request names; namespace is that of its body, which wins over that of its query.
func (p *Provider) find(name, namespace string, r *http.Request) (Deployed, error) {
	key := pipeline.Named(name, cmp.Or(namespace, r.URL.Query().Get("namespace")))
	if d, there := p.Registry.Function(key); there {
		return d, nil
	}
	return Deployed{}, p.Registry.NotFound("function", key)
}

// namespaceOf is the namespace of a request: in its body, else in its query, else the default.
func namespaceOf(body string, r *http.Request) string {
	return cmp.Or(body, r.URL.Query().Get("namespace"), pipeline.DefaultNamespace)
}

// readJSON decodes a request's body, which must be one JSON value.
func readJSON(w http.ResponseWriter, r *http.Request, v any) error {
	return readJSONOf(w, r, v, maxBody)
}

// readJSONOf is readJSON of a body of at most that many bytes.
func readJSONOf(w http.ResponseWriter, r *http.Request, v any, most int64) error {
	return readValue(json.NewDecoder(http.MaxBytesReader(w, r.Body, most)), v, most)
}

// readStrict is readJSON that refuses fields that v does not have.
func readStrict(w http.ResponseWriter, r *http.Request, v any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	return readValue(d, v, maxBody)
}

// readValue decodes one JSON value of at most that many bytes.
func readValue(d *json.Decoder, v any, most int64) error {
	err := d.Decode(v)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more than one JSON value")
		}
	}
	var wrong *json.UnmarshalTypeError
	var tooLarge *http.MaxBytesError
	unknown := func() (name string) {
		text, _ := strings.CutPrefix(err.Error(), "json: unknown field ")
		name, _ = strconv.Unquote(text)
		return name
	}
	switch {
	case err == nil:
		return nil
	case unknown() != "":
		return &pipeline.FieldError{Path: strconv.Quote(unknown()), Got: "a field that is unknown", Want: "none of this name"}
	case errors.As(err, &tooLarge):
		return fmt.Errorf("body: more than %d bytes: %w", most, err)
	case errors.As(err, &wrong):
		return &pipeline.FieldError{Path: cmp.Or(wrong.Field, "body"), Got: "a JSON " + wrong.Value, Want: wrong.Type.String()}
	default:
		return &pipeline.FieldError{Path: "body", Got: err.Error(), Want: "one JSON object"}
	}
}

// namesNoProcess reports whether the image decides which program a deployment runs. In mode static
// no program runs.
func namesNoProcess(d types.FunctionDeployment) bool {
	return d.EnvProcess == "" && d.EnvVars["fprocess"] == "" && d.EnvVars["function_process"] == "" && d.EnvVars["mode"] != "static"
}
