package provider

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// checkOptions refuses runtime classes, devices and spare containers that the operator does not
// allow. Values that cannot be read are package pipeline's to refuse.
func (c *Config) checkOptions(annotations map[string]string) []error {
	const class, devices, spares = pipeline.Prefix + "runtime-class", pipeline.Prefix + "cdi-devices", pipeline.Prefix + "spares"
	asked := map[string]string{}
	for _, name := range []string{class, devices, spares} {
		if value, there := annotations[name]; there {
			asked[name] = value
		}
	}
	f, err := pipeline.Parse("f", "", nil, asked)
	if err != nil {
		return nil
	}
	var errs []error
	bad := func(name, got, want string) {
		errs = append(errs, &pipeline.FieldError{Path: fmt.Sprintf("annotations[%q]", name), Got: quote(got), Want: want})
	}
	if name := f.RuntimeClass; name != "" && !slices.Contains(c.RuntimeClasses, name) {
		bad(class, name, allowed("runtime class", c.RuntimeClasses, "--runtime-classes"))
	}
	for _, d := range f.CDIDevices {
		kind, _, _ := strings.Cut(d, "=")
		if !slices.Contains(c.CDIDevices, d) && !slices.Contains(c.CDIDevices, kind+"=*") {
			bad(devices, d, allowed("device", c.CDIDevices, "--cdi-devices"))
		}
	}
	if f.Spares > c.Spares {
		bad(spares, asked[spares], fmt.Sprintf("at most %d: the operator allows no more (up --spares)", c.Spares))
	}
	return errs
}

// allowed says what the operator allows, and with which flag.
func allowed(what string, names []string, flag string) string {
	if len(names) == 0 {
		return fmt.Sprintf("no %s: the operator allows none (up %s)", what, flag)
	}
	return fmt.Sprintf("a %s that the operator allows (up %s): %s", what, flag, strings.Join(names, ", "))
}

// check refuses policies that do not exist. Package pipeline checks the rank.
func (p *Policies) check(asked pipeline.Policies) error {
	var errs []error
	for _, level := range []struct {
		name, asked string
		known       []string
	}{{"allocator", asked.Allocator, p.Allocators}, {"route", asked.Route, p.Routes}} {
		if level.asked != "" && !slices.Contains(level.known, level.asked) {
			path := fmt.Sprintf("annotations[%q]", pipeline.Prefix+level.name)
			errs = append(errs, &pipeline.FieldError{Path: path, Got: quote(level.asked), Want: "one of " + strings.Join(level.known, ", ")})
		}
	}
	return errors.Join(errs...)
}
