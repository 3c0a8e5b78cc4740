package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Deploy creates or updates a stack's functions.
func Deploy(ctx context.Context, args []string, out io.Writer) error {
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
		if err := checkPipelines(ctx, c, all, out); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// invocationName returns the name of a function in a URL: with its namespace, unless the name alone
// means the same.
func invocationName(name, namespace string) string {
	if namespace == "" {
		return name
	}
	return pipeline.Key{Name: name, Namespace: namespace}.Short()
}
