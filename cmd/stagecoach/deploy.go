package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"
)

// readyPatience bounds deploy --wait, for each function.
const readyPatience = 2 * time.Minute

func runDeploy(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("deploy", flag.ContinueOnError)
	file, filter := stackFlags(fs)
	api := newAPIFlags(fs)
	tag := fs.String("tag", "", "tag of the images, in place of that in the stack file")
	wait := fs.Bool("wait", false, "return when each function has the replicas that its label com.openfaas.scale.min asks for")
	if err := parseFlags(fs, args); err != nil {
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
	var all []deployment
	var failed []error
	for _, name := range names {
		d := stackDeployment(name, f.Functions[name])
		d.Image = retag(d.Image, *tag)
		if api.namespace != "" {
			d.Namespace = api.namespace
		}
		created, err := c.put(ctx, d)
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
		fmt.Fprintf(out, "%s: %s, %s/function/%s\n", name, what, c.base, invocationName(d.Service, d.Namespace))
	}
	if *wait {
		for _, d := range all {
			if err := waitReady(ctx, c, d, out); err != nil {
				failed = append(failed, err)
			}
		}
	}
	return errors.Join(failed...)
}

// invocationName is how a function is called: with its namespace unless that is the default one.
func invocationName(name, namespace string) string {
	if namespace == "" || namespace == "openfaas-fn" {
		return name
	}
	return name + "." + namespace
}

// waitReady returns once a function has the replicas that it must have.
func waitReady(ctx context.Context, c *client, d deployment, out io.Writer) error {
	want := 1
	if n, err := strconv.Atoi(d.Labels["com.openfaas.scale.min"]); err == nil {
		want = n
	}
	ctx, cancel := context.WithTimeout(ctx, readyPatience)
	defer cancel()
	begin := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		var s functionStatus
		err := c.get(ctx, "/system/function/"+url.PathEscape(d.Service)+(&apiFlags{namespace: d.Namespace}).query(), &s)
		if err == nil && s.AvailableReplicas >= want {
			fmt.Fprintf(out, "%s: ready with %d replicas after %.1f s\n", d.Service, s.AvailableReplicas, time.Since(begin).Seconds())
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("%s: after %.0f s %d replicas, want %d; `stagecoach logs %[1]s` may say why", d.Service, time.Since(begin).Seconds(), s.AvailableReplicas, want), err)
		case <-tick.C:
		}
	}
}

func runRemove(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("remove", flag.ContinueOnError)
	file, filter := stackFlags(fs)
	api := newAPIFlags(fs)
	names, err := parseMixed(fs, args)
	if err != nil {
		return err
	}
	namespaces, inStack := map[string]string{}, ""
	switch {
	case len(names) == 0:
		f, all, err := openStack(*file, *filter)
		if err != nil {
			return err
		}
		names, inStack = all, f.Provider.Gateway
		for _, n := range names {
			namespaces[n] = f.Functions[n].Namespace
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
		if err := c.send(ctx, "remove "+name, "DELETE", "/system/functions"+(&apiFlags{namespace: namespace}).query(), body); err != nil {
			failed = append(failed, err)
			continue
		}
		fmt.Fprintf(out, "%s: removed\n", name)
	}
	return errors.Join(failed...)
}
