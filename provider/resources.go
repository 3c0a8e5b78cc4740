package provider

import (
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"strings"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Resources holds a deployment's limits and requests per replica. 0 means none.
type Resources struct {
	MemoryLimit, MemoryRequest int64 // bytes
	CPULimit, CPURequest       int   // thousandths of a core
}

// Resources returns the function's limits and requests. As in Kubernetes, a missing request equals
// the limit.
func (d *Deployed) Resources() Resources {
	var r Resources
	if l := d.Deployment.Limits; l != nil {
		r.MemoryLimit, r.CPULimit = amount(l.Memory, 1), int(amount(l.CPU, 1000))
	}
	r.MemoryRequest, r.CPURequest = r.MemoryLimit, r.CPULimit
	if q := d.Deployment.Requests; q != nil {
		if q.Memory != "" {
			r.MemoryRequest = amount(q.Memory, 1)
		}
		if q.CPU != "" {
			r.CPURequest = int(amount(q.CPU, 1000))
		}
	}
	return r
}

// quantity is Kubernetes' notation for numbers of bytes, cores and devices.
var quantity = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?)([mkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,2})?$`)

// Bounds of quantities that are not 0.
const (
	minMemory = 4 << 20 // in bytes; functions/noop, the smallest stage, runs with so much
	maxMemory = 1 << 50 // in bytes
	minCPU    = 1       // in thousandths of a core; less would round up to this
	maxCPU    = 1 << 20 // in thousandths of a core
)

// parseQuantity returns a quantity in units of 1/scale, rounded up as Kubernetes does.
func parseQuantity(s string, scale int64) (*big.Int, bool) {
	m := quantity.FindStringSubmatch(s)
	if m == nil || len(s) > 32 {
		return nil, false
	}
	n, ok := new(big.Rat).SetString(m[1])
	if !ok {
		return nil, false
	}
	factor := "1"
	switch suffix := m[2]; {
	case suffix == "":
	case suffix == "m":
		factor = "1/1000"
	case strings.HasSuffix(suffix, "i"):
		power := strings.Index("KMGTPE", suffix[:1]) + 1
		factor = new(big.Int).Lsh(big.NewInt(1), uint(10*power)).String()
	case len(suffix) == 1:
		power := strings.Index("kMGTPE", suffix) + 1
		factor = fmt.Sprintf("1e%d", 3*power)
	default:
		factor = "1" + suffix
	}
	f, ok := new(big.Rat).SetString(factor)
	if !ok {
		return nil, false
	}
	n.Mul(n, f).Mul(n, new(big.Rat).SetInt64(scale))
	whole, rest := new(big.Int).QuoRem(n.Num(), n.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	return whole, true
}

// amount returns a quantity that a deploy has checked, or 0 if it is invalid.
func amount(s string, scale int64) int64 {
	if n, ok := parseQuantity(s, scale); ok && n.IsInt64() {
		return n.Int64()
	}
	return 0
}

// checkResources returns an error for every quantity that is invalid or out of bounds.
func checkResources(path string, r *types.FunctionResources) (errs []error) {
	if r == nil {
		return nil
	}
	for _, f := range []struct {
		name, value        string
		scale, least, most int64
		want               string
	}{
		{"memory", r.Memory, 1, minMemory, maxMemory, "a quantity such as 128Mi or 1.5Gi, 4Mi to 1Pi"},
		{"cpu", r.CPU, 1000, minCPU, maxCPU, "a quantity such as 0.5 or 100m, 1m to 1048 cores"},
		{"nvidia.com/gpu", r.NvidiaGPU, 1, 0, maxCPU, "a number of devices"},
		{"amd.com/gpu", r.AmdGPU, 1, 0, maxCPU, "a number of devices"},
		{"intel.com/gpu", r.IntelGPU, 1, 0, maxCPU, "a number of devices"},
	} {
		if f.value == "" {
			continue
		}
		n, ok := parseQuantity(f.value, f.scale)
		if ok && n.Cmp(big.NewInt(f.most)) <= 0 && !below(f.value, f.scale, f.least) {
			continue
		}
		errs = append(errs, &pipeline.FieldError{Path: path + "." + f.name, Got: quote(f.value), Want: f.want})
	}
	return errs
}

// below reports whether a quantity is not 0 and less than least, in units of 1/scale.
func below(s string, scale, least int64) bool {
	const fine = 1e9 // finer units, because parseQuantity rounds up
	n, ok := parseQuantity(s, scale*fine)
	return ok && n.Sign() > 0 && n.Cmp(new(big.Int).Mul(big.NewInt(least), big.NewInt(fine))) < 0
}

// checkRequests returns an error for every request above its limit.
func checkRequests(limits, requests *types.FunctionResources) (errs []error) {
	if limits == nil || requests == nil {
		return nil
	}
	for _, f := range []struct {
		name, limit, request string
		scale                int64
	}{{"memory", limits.Memory, requests.Memory, 1}, {"cpu", limits.CPU, requests.CPU, 1000}} {
		limit, ok := parseQuantity(f.limit, f.scale)
		request, ok2 := parseQuantity(f.request, f.scale)
		if ok && ok2 && limit.Sign() > 0 && request.Cmp(limit) > 0 {
			errs = append(errs, &pipeline.FieldError{Path: "requests." + f.name, Got: quote(f.request), Want: "at most limits." + f.name + ", " + f.limit})
		}
	}
	return errs
}

// checkRoom refuses a function whose replicas no known node could hold. Its limits and requests
// must be valid.
func (p *Provider) checkRoom(d *Deployed) error {
	var errs []error
	for _, lack := range p.Room.Lacking(d.Planned(nil)) {
		path, got := askedFor(d, string(lack.Of))
		errs = append(errs, &pipeline.FieldError{
			Path: path, Got: fmt.Sprintf("%s: a replica needs %s", got, lack.Need),
			Want: fmt.Sprintf("what a node could hold even if it were empty: %s; ask for less, or let a larger node join first", lack.Most),
		})
	}
	return errors.Join(errs...)
}

// askedFor returns the field of a deployment that asks for a resource, and its value. If the
// deployment requests none, the limit counts.
func askedFor(d *Deployed, resource string) (path, value string) {
	name := map[string]string{"devices": pipeline.Prefix + "gpu", "device-memory": pipeline.Prefix + "gpu-memory"}[resource]
	if name != "" {
		return fmt.Sprintf("annotations[%q]", name), quote(deref(d.Deployment.Annotations)[name])
	}
	for _, of := range []struct {
		name string
		r    *types.FunctionResources
	}{{"requests", d.Deployment.Requests}, {"limits", d.Deployment.Limits}} {
		if of.r == nil {
			continue
		}
		value = of.r.Memory
		if resource == "cpu" {
			value = of.r.CPU
		}
		if value != "" {
			return of.name + "." + resource, quote(value)
		}
	}
	return resource, quote("")
}
