package pipeline

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// FieldError describes a fault in one field of a function's declaration.
type FieldError struct {
	Path string // for example annotations["stagecoach.dev/slo"]
	Got  string
	Want string
}

// Error returns the field, what was got and what is wanted.
func (e *FieldError) Error() string { return fmt.Sprintf("%s: got %s, want %s", e.Path, e.Got, e.Want) }

// Defaults of labels and annotations. Those of scaling are OpenFaaS's.
const (
	DefaultMin        = 1
	DefaultMax        = 20
	DefaultZeroAge    = 15 * time.Minute
	DefaultQueueLimit = 1000
	DefaultType       = "capacity"
	DefaultTarget     = 50
	DefaultProportion = 0.9
)

// scaleLabel is the prefix of OpenFaaS's labels for scaling.
const scaleLabel = "com.openfaas.scale."

// Forms of names: Kubernetes' for new functions and pipelines, and the form that earlier versions
// accepted.
var (
	nameForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	oldForm  = regexp.MustCompile(`^[-a-zA-Z_0-9.]{1,253}$`)
)

// nameWant describes nameForm in words.
const nameWant = "1 to 63 lower-case letters, digits and '-', a letter or digit at both ends"

// ValidName reports whether s is allowed as the name of a new function or pipeline.
func ValidName(s string) bool { return nameForm.MatchString(s) }

// Parse reads a function's labels and annotations, and fills in defaults. It ignores labels and
// annotations of other products. An unknown annotation with Stagecoach's prefix is an error,
// because it is probably misspelt. The error joins one *FieldError per wrong field.
func Parse(name, namespace string, labels, annotations map[string]string) (Function, error) {
	return parse(name, namespace, labels, annotations, ValidName)
}

// ParseStored is Parse for a function that an earlier version may have stored. Names may have up to
// 253 letters, digits, '-', '_' and '.'.
func ParseStored(name, namespace string, labels, annotations map[string]string) (Function, error) {
	return parse(name, namespace, labels, annotations, oldForm.MatchString)
}

func parse(name, namespace string, labels, annotations map[string]string, validName func(string) bool) (Function, error) {
	f := Function{
		Name: name, Namespace: namespace, QueueLimit: DefaultQueueLimit, Weight: 1, Idempotent: true, Variant: Variant{Accuracy: 1}, Start: "auto", Isolation: Isolation{Network: NetworkDefault},
		Scale: Scale{Min: DefaultMin, Max: DefaultMax, ZeroAge: DefaultZeroAge}, Async: defaultAsync(),
	}
	p := &parser{validName: validName}
	if !validName(name) {
		p.fail("name", strconv.Quote(name), nameWant+": deploy it under such a name")
	}
	p.annotations(&f, annotations)
	p.retries(&f.Async.Retry, annotations)
	p.probes(annotations)
	p.labels(&f, labels)
	return f, errors.Join(p.errs...)
}

// parser collects errors. Each of its methods reads one value, and returns the fallback if the
// value is bad.
type parser struct {
	path      string // of the current value
	errs      []error
	validName func(string) bool // checks names of functions and pipelines
}

func (p *parser) fail(path, got, want string) {
	p.errs = append(p.errs, &FieldError{path, got, want})
}

// bytes reads a size in Kubernetes' notation with binary units.
func (p *parser) bytes(v string) int64 {
	text := strings.TrimSpace(v)
	for i, unit := range []string{"Ki", "Mi", "Gi", "Ti"} {
		if digits, ok := strings.CutSuffix(text, unit); ok {
			if n, err := strconv.ParseInt(digits, 10, 64); err == nil && n > 0 && n <= 1<<20 {
				return n << (10 * (i + 1))
			}
		}
	}
	p.fail(p.path, strconv.Quote(v), "a size such as 512Mi or 8Gi")
	return 0
}

func (p *parser) number(v string, fallback, least, most int) int {
	n, err := strconv.Atoi(strings.TrimSpace(v))
	if err != nil || n < least || n > most {
		p.fail(p.path, strconv.Quote(v), fmt.Sprintf("a number from %d to %d", least, most))
		return fallback
	}
	return n
}

// batch reads N, auto or auto:N.
func batch(p *parser, v string) (n int, auto bool) {
	const most = 4096
	first, number, limited := strings.Cut(strings.TrimSpace(v), ":")
	if first == "auto" && !limited {
		return 0, true
	}
	if first == "auto" {
		first = number
	} else if limited {
		first = "" // is no number
	}
	n, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil || n < 1 || n > most {
		p.fail(p.path, strconv.Quote(v), fmt.Sprintf("a number from 1 to %d, auto, or auto:N with such a number", most))
		return 0, false
	}
	return n, limited
}

// batchWait reads a duration up to MostBatchWait. A number without a unit is refused, because it
// would mean seconds.
func batchWait(p *parser, v string) time.Duration {
	d, err := time.ParseDuration(strings.TrimSpace(v))
	if err != nil || d < 0 || d > MostBatchWait {
		p.fail(p.path, strconv.Quote(v), fmt.Sprintf("a duration from 0 to %v, such as 2ms", MostBatchWait))
		return 0
	}
	return d
}

func (p *parser) boolean(v string) bool {
	b, err := strconv.ParseBool(strings.TrimSpace(v))
	if err != nil {
		p.fail(p.path, strconv.Quote(v), "true or false")
	}
	return b
}

// duration reads a Go duration or, as OpenFaaS allows, a number of seconds.
func (p *parser) duration(v string, fallback time.Duration) time.Duration {
	v = strings.TrimSpace(v)
	d, err := time.ParseDuration(v)
	if n, atoi := strconv.Atoi(v); atoi == nil && n <= 1<<31 {
		d, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || d <= 0 {
		p.fail(p.path, strconv.Quote(v), "a duration above zero, such as 400ms, 15m, or 30 (seconds)")
		return fallback
	}
	return d
}

func (p *parser) name(v string) string {
	v = strings.TrimSpace(v)
	if !p.validName(v) {
		p.fail(p.path, strconv.Quote(v), nameWant)
	}
	return v
}

// processName reads the name of a worker process.
func (p *parser) processName(v string) string {
	v = strings.TrimSpace(v)
	if !oldForm.MatchString(v) {
		p.fail(p.path, strconv.Quote(v), "1 to 253 letters, digits, '-', '_' and '.'")
	}
	return v
}

// names reads a comma-separated list without duplicates.
func (p *parser) names(v string) []string {
	var out []string
	for part := range strings.SplitSeq(v, ",") {
		n := p.name(part)
		if slices.Contains(out, n) {
			p.fail(p.path, strconv.Quote(v), fmt.Sprintf("each name once, %q is there twice", n))
			continue
		}
		out = append(out, n)
	}
	return out
}

func (p *parser) annotations(f *Function, annotations map[string]string) {
	fields := map[string]func(v string){
		"pipeline": func(v string) { f.Pipelines = p.names(v); slices.Sort(f.Pipelines) },
		"next":     func(v string) { f.Next = p.edges(f.Name, v) },
		"each":     func(v string) { f.Each = p.boolean(v) },
		"join": func(v string) {
			if strings.TrimSpace(v) != "all" {
				f.Join = p.number(v, 0, 1, 1000)
			}
		},
		"slo":               func(v string) { f.SLO = p.duration(v, 0) },
		"gpu":               func(v string) { f.GPU = p.number(v, 0, 0, 64) },
		"gpu-memory":        func(v string) { f.GPUMemory = p.bytes(v) },
		"process":           func(v string) { f.Process = p.processName(v) },
		"queue-limit":       func(v string) { f.QueueLimit = p.number(v, DefaultQueueLimit, 1, 1_000_000) },
		"async-concurrency": func(v string) { f.Async.Concurrency = p.number(v, DefaultConcurrency, 1, 1000) },
		"async-queue-limit": func(v string) { f.Async.QueueLimit = p.number(v, DefaultAsyncQueueLimit, 1, 1_000_000) },
		"weight":            func(v string) { f.Weight = p.number(v, 1, 1, 1000) },
		"idempotent":        func(v string) { f.Idempotent = p.boolean(v) },
		"batch":             func(v string) { f.Batch, f.AutoBatch = batch(p, v) },
		"batch-wait":        func(v string) { f.BatchWait = batchWait(p, v) },
		"start": func(v string) {
			if f.Start = strings.TrimSpace(v); !slices.Contains(starts, f.Start) {
				p.fail(p.path, strconv.Quote(v), "auto, fork, heap, map or cold")
			}
		},
		"network": func(v string) {
			if f.Network = strings.TrimSpace(v); !slices.Contains([]string{NetworkDefault, NetworkHost, NetworkNone}, f.Network) {
				p.fail(p.path, strconv.Quote(v), "default, host or none")
			}
		},
		"runtime-class":     func(v string) { f.RuntimeClass = p.className(v) },
		"drop-capabilities": func(v string) { f.DropCapabilities = p.capabilities(v) },
		"cdi-devices":       func(v string) { f.CDIDevices = p.cdiDevices(v) },
		"spares":            func(v string) { f.Spares = p.number(v, 0, 0, MaxSpares) },
		"items": func(v string) {
			if f.Items = strings.TrimSpace(v); f.Items != ItemsMany && f.Items != ItemsOne {
				p.fail(p.path, strconv.Quote(v), "many or one: a JSON array in a request is a list of items, or one document")
			}
		},
		"example": func(string) {}, // an example input for measuring
		"status":  func(string) {}, // describe shows it, and a deploy may send it back
	}
	maps.Copy(fields, p.variantsAndPolicies(f))
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		field, ours := strings.CutPrefix(key, Prefix)
		if !ours {
			continue
		}
		p.path = fmt.Sprintf("annotations[%q]", key)
		read, known := fields[field]
		if !known {
			p.fail(p.path, "an unknown annotation", "one of "+strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
			continue
		}
		read(annotations[key])
	}
	if f.GPU == 0 && f.GPUMemory > 0 {
		p.fail(fmt.Sprintf("annotations[%q]", Prefix+"gpu-memory"), strconv.Quote(annotations[Prefix+"gpu-memory"]), "an annotation "+Prefix+"gpu beside it")
	}
	p.process(f, annotations)
	p.variant(f, annotations)
	if len(f.Pipelines) == 0 && len(f.Next) > 0 && f.VariantOf == "" {
		p.fail(fmt.Sprintf("annotations[%q]", Prefix+"next"), strconv.Quote(annotations[Prefix+"next"]), "an annotation "+Prefix+"pipeline beside it")
	}
}

// process checks annotations that do not go together with a worker process, whose stages share one
// device.
func (p *parser) process(f *Function, annotations map[string]string) {
	path := func(name string) string { return fmt.Sprintf("annotations[%q]", Prefix+name) }
	switch {
	case f.Process == "":
	case f.GPU > 1:
		p.fail(path("gpu"), strconv.Quote(annotations[Prefix+"gpu"]), "0 or 1 beside "+Prefix+"process: that process has one device")
	case f.Start != "" && f.Start != "auto":
		p.fail(path("start"), strconv.Quote(f.Start), "auto beside "+Prefix+"process: its stages start in that process")
	}
}

// variant refuses the annotations of a graph and of a stage on a variant: its stage has them.
func (p *parser) variant(f *Function, annotations map[string]string) {
	if f.VariantOf == "" {
		return
	}
	for _, name := range []string{"allocator", "each", "join", "length", "min-accuracy", "next", "pipeline", "rank", "route", "slo"} {
		if v, set := annotations[Prefix+name]; set {
			p.fail(fmt.Sprintf("annotations[%q]", Prefix+name), strconv.Quote(v),
				fmt.Sprintf("none beside %svariant-of: the stage %q declares it", Prefix, f.VariantOf))
		}
	}
}

// starts lists the ways in which replicas with a model can start. "auto" is the default.
var starts = []string{"auto", "fork", "heap", "map", "cold"}

func (p *parser) accuracy(v string) float64 {
	a, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
	if err != nil || !(a > 0 && a <= 1) {
		p.fail(p.path, strconv.Quote(v), "a number above 0 and at most 1")
		return 1
	}
	return a
}

// edges reads the successors. Conditions are refused, because they have no meaning yet.
func (p *parser) edges(self, v string) []Edge {
	for part := range strings.SplitSeq(v, ",") {
		if fields := strings.Fields(part); len(fields) > 1 && fields[1] == "if" {
			p.fail(p.path, strconv.Quote(strings.TrimSpace(part)), "a name alone: conditional edges are not supported yet")
			return nil
		}
	}
	var out []Edge
	for _, to := range p.names(v) {
		if to == self {
			p.fail(p.path, strconv.Quote(v), "another function: a stage cannot follow itself")
			continue
		}
		out = append(out, Edge{To: to})
	}
	slices.SortFunc(out, func(a, b Edge) int { return strings.Compare(a.To, b.To) })
	return out
}

func (p *parser) labels(f *Function, labels map[string]string) {
	s := &f.Scale
	fields := map[string]func(v string){
		"min":               func(v string) { s.Min = p.number(v, DefaultMin, 0, 100_000) },
		"max":               func(v string) { s.Max = p.number(v, DefaultMax, 1, 100_000) },
		"zero":              func(v string) { s.Zero = p.boolean(v) },
		"zero-duration":     func(v string) { s.ZeroAge = p.duration(v, DefaultZeroAge) },
		"target":            func(v string) { s.Target = p.number(v, DefaultTarget, 1, 1_000_000) },
		"target-proportion": func(v string) { s.Proportion = p.accuracy(v) },
		"factor":            func(v string) { p.number(v, 20, 0, 100) },
		"type": func(v string) {
			if s.Type = v; !slices.Contains([]string{"rps", "capacity", "cpu"}, v) {
				p.fail(p.path, strconv.Quote(v), "rps, capacity or cpu")
			}
		},
	}
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if read, known := fields[strings.TrimPrefix(key, scaleLabel)]; known && strings.HasPrefix(key, scaleLabel) {
			p.path = fmt.Sprintf("labels[%q]", key)
			read(labels[key])
		}
	}
	s.target()
	minPath := fmt.Sprintf("labels[%q]", scaleLabel+"min")
	switch {
	case s.Min == 0 && !s.Zero:
		p.fail(minPath, `"0"`, fmt.Sprintf("at least 1, or %szero: \"true\" beside it", scaleLabel))
	case s.Max < s.Min: // cannot happen with the defaults alone
		p.fail(minPath, strconv.Itoa(s.Min), fmt.Sprintf("at most %smax, which is %d", scaleLabel, s.Max))
	}
}

// target fills in OpenFaaS's defaults if the owner declared the type or the value of a target.
func (s *Scale) target() {
	if s.Type == "" && s.Target == 0 {
		s.Proportion = 0
		return
	}
	s.Type, s.Target, s.Proportion = cmp.Or(s.Type, DefaultType), cmp.Or(s.Target, DefaultTarget), cmp.Or(s.Proportion, DefaultProportion)
}
