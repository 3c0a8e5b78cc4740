package provider

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// maxVariable is the largest environment variable in bytes, as NAME=VALUE. It is Linux's
// MAX_ARG_STRLEN without the final NUL. With a larger one, no process can be started.
const maxVariable = 128<<10 - 1

// readDeployment reads and checks a deployment, and pulls its image. Errors name every bad field.
func (p *Provider) readDeployment(w http.ResponseWriter, r *http.Request) (Deployed, error) {
	var d types.FunctionDeployment
	if err := readJSON(w, r, &d); err != nil {
		return Deployed{}, err
	}
	d.Namespace = namespaceOf(d.Namespace, r)
	DropAnswered(deref(d.Annotations))
	fn, err := parse(d, pipeline.Parse)
	out := Deployed{Key: fn.Key(), Declared: fn, stored: stored{Deployment: d, CreatedAt: time.Now().UTC()}}
	err = errors.Join(err, p.check(d), admit(p.Registry, d.Namespace), p.Policies.check(fn.Policies))
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
			err = errors.Join(err, p.checkMode(d, digest), p.checkModel(d, digest))
		}
	}
	if err == nil && namesNoProcess(d) {
		if out.Guess, err = p.Images.Guess(d.Image, out.Digest); err != nil {
			err = &pipeline.FieldError{Path: "envProcess", Got: "none, and image " + quote(d.Image) + ": " + err.Error(), Want: "the command to run, as fprocess in the stack file (faas-cli deploy --fprocess)"}
		}
	}
	if err == nil {
		err = p.checkProgram(&out)
	}
	return out, err
}

// checkProgram refuses a program that replicas do not see, such as an interpreter below /tmp. If
// such a deploy were accepted, each start would fail.
func (p *Provider) checkProgram(d *Deployed) error {
	env := d.Environment()
	if d.Deployment.Image == "" || env["mode"] == "static" {
		return nil
	}
	process, path := d.Process(), "envProcess"
	for _, name := range []string{"fprocess", "function_process"} {
		if process == "" && env[name] != "" {
			process, path = env[name], "envVars."+name
		}
	}
	err := p.Images.Program(d.Deployment.Image, d.Digest, process, env)
	if err == nil {
		return nil
	}
	return &pipeline.FieldError{Path: path, Got: quote(cmp.Or(process, "the image's own program")), Want: "a program that replicas can run: " + err.Error()}
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
	errs = append(errs, p.checkOptions(deref(d.Annotations))...)
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

// checkModel refuses a model that no start could load. Only the start finds out whether the names
// and shapes fit the handler's module.
func (p *Provider) checkModel(d types.FunctionDeployment, digest string) error {
	model, set := d.EnvVars[wire.EnvModel]
	if set && !filepath.IsLocal(model) {
		return nil // none, or check refuses it
	}
	bad := p.Images.Model(d.Image, digest, d.EnvVars)
	switch {
	case bad == nil:
		return nil
	case set:
		return &pipeline.FieldError{Path: "envVars." + wire.EnvModel, Got: quote(model), Want: "a model that can be loaded: " + bad.Error()}
	}
	return &pipeline.FieldError{Path: "image", Got: quote(d.Image), Want: "an image whose model can be loaded: " + bad.Error()}
}

// checkMode refuses a mode that the watchdog does not have. To a stage, the variable may mean
// anything else, except afterburn, which is surely meant for a watchdog.
func (p *Provider) checkMode(d types.FunctionDeployment, digest string) error {
	const want = "http, streaming, serializing or static"
	mode := d.EnvVars["mode"]
	switch mode {
	case "", "http", "streaming", "serializing", "static":
		return nil
	case "afterburn":
		return &pipeline.FieldError{Path: "envVars.mode", Got: quote(mode), Want: want + "; of-watchdog has removed afterburn: let the program serve HTTP, in mode http"}
	}
	if p.Images.Stage(d.Image, digest) {
		return nil
	}
	return &pipeline.FieldError{Path: "envVars.mode", Got: quote(mode), Want: want}
}

// namesNoProcess reports whether the image must say which program runs. In mode static, none does.
func namesNoProcess(d types.FunctionDeployment) bool {
	return d.EnvProcess == "" && d.EnvVars["fprocess"] == "" && d.EnvVars["function_process"] == "" && d.EnvVars["mode"] != "static"
}
