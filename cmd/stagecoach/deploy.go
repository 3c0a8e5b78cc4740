package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

func runDeploy(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("deploy", flag.ContinueOnError)
	file, filter := stackFlags(fs)
	api := newAPIFlags(fs)
	tag := fs.String("tag", "", "tag of the images, in place of that in the stack file")
	wait := fs.Bool("wait", false, "return when each deployed revision has the replicas that its label com.openfaas.scale.min asks for, or cannot start")
	check := fs.Bool("check-graphs", true, "check the pipelines first, and send nothing if one has a fault")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	f, names, err := openStack(*file, *filter)
	if err != nil {
		return err
	}
	c, err := api.open(f.Provider.Gateway)
	if err != nil {
		return err
	}
	if *check {
		if err := checkGraphs(ctx, c, f, names, api.namespace); err != nil {
			return err
		}
	}
	var all []client.Deployment
	var failed []error
	for _, name := range names {
		d := client.FromStack(name, f.Functions[name])
		d.Image = retag(d.Image, *tag)
		if api.namespace != "" {
			d.Namespace = api.namespace
		}
		created, guessed, err := c.Put(ctx, d)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed = append(failed, err)
			continue
		}
		all = append(all, d)
		what := "updated"
		if created {
			what = "created"
		}
		fmt.Fprintf(out, "%s: %s, %s/function/%s\n", name, what, c.Base, invocationName(d.Service, d.Namespace))
		if guessed != "" {
			fmt.Fprintf(out, "%s: %s\n", name, console.Harmless(guessed))
		}
	}
	if *wait {
		failed = append(failed, client.WaitReady(ctx, c, all, out))
		if err := checkPipelines(ctx, c, all); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// invocationName is what a URL calls a function: with its namespace, unless there is none or the name alone means the same.
func invocationName(name, namespace string) string {
	if namespace == "" {
		return name
	}
	return pipeline.Key{Name: name, Namespace: namespace}.Short()
}

func runRemove(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("remove", flag.ContinueOnError)
	file, filter := stackFlags(fs)
	api := newAPIFlags(fs)
	names, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	namespaces, inStack, ofStack := map[string]string{}, "", len(names) == 0
	switch {
	case ofStack:
		f, all, err := openStack(*file, *filter)
		if err != nil {
			return err
		}
		names, inStack = all, f.Provider.Gateway
		for _, n := range names {
			namespaces[n] = cmp.Or(f.Functions[n].Namespace, pipeline.DefaultNamespace) // a name in a stack is all name, dots included
		}
	case *file != "" || *filter != "":
		return fmt.Errorf("remove: got functions %q and -f or --filter, want one of the two", names)
	}
	c, err := api.open(inStack)
	if err != nil {
		return err
	}
	var failed []error
	for _, name := range names {
		namespace := namespaces[name]
		if api.namespace != "" {
			namespace = api.namespace
		}
		body := struct {
			Name      string `json:"functionName"`
			Namespace string `json:"namespace,omitempty"`
		}{name, namespace}
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		a, err := c.Do(ctx, http.MethodDelete, "/system/functions"+(&apiFlags{namespace: namespace}).query(), "application/json", b)
		switch {
		case err != nil:
			failed = append(failed, err)
		case a.Status == http.StatusNotFound && ofStack: // that is what the user wants
			fmt.Fprintf(out, "%s: is not deployed\n", name)
		case a.Status >= 300:
			failed = append(failed, a.Unexpected("remove "+name))
		default:
			fmt.Fprintf(out, "%s: removed\n", name)
		}
	}
	return errors.Join(failed...)
}
