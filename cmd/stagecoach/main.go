// Command stagecoach serves pipelines of ML stages behind the OpenFaaS API.
//
// `stagecoach help` lists its commands; each takes --help.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/stagecoach-serving/stagecoach/cmd/stagecoach/cli"
	"github.com/stagecoach-serving/stagecoach/cmd/stagecoach/demo"
	"github.com/stagecoach-serving/stagecoach/control/decide"
	"github.com/stagecoach-serving/stagecoach/control/replay"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// command is a command of the program. It runs with the arguments after its name. It writes its
// result to out, and everything else to standard error.
type command struct {
	name    string
	summary string
	run     func(ctx context.Context, args []string, out io.Writer) error
	// Values of the first argument, each with what follows it. Each verb takes --help.
	verbs []string
}

// commands has all commands, in the order in which help lists them.
func commands() []command {
	return []command{
		{"up", "one process on this machine: API, queues, autoscaler, KeysManager", runUp, nil},
		{"keysmanager", "a node of its own: starts replicas and keeps parameters, for an `up --nats-listen`", runKeysManager, nil},
		{"cluster", "the files of a NATS cluster that several control planes share, and that nodes join", runCluster, []string{"init --servers A,B,C", "backup FILE", "restore FILE"}},
		{"new", "NAME --lang LANG: make a function from a template, and add it to the stack file", cli.New, nil},
		{"build", "make OCI images of a stack's functions, without Docker", cli.Build, nil},
		{"image", "the store of OCI images that `build` fills and `up` runs from", cli.Image, cli.ImageVerbs()},
		{"deploy", "create or update a stack's functions", cli.Deploy, nil},
		{"remove", "NAME ... | -f FILE: remove functions", cli.Remove, nil},
		{"list", "the functions of a running stagecoach", cli.List, nil},
		{"describe", "NAME: what is known of a function", cli.Describe, nil},
		{"invoke", "NAME < BODY: call a function or pipeline", cli.Invoke, nil},
		{"logs", "NAME: what a function's replicas have printed", cli.Logs, nil},
		{"profile", "FUNCTION: how long it takes by CPU, batch size and length of its input, measured and stored with it", cli.Profile, nil},
		{"scale", "NAME REPLICAS: have so many, now", cli.Scale, nil},
		{"secret", "values that a function reads from files if it names them", cli.Secret, []string{"create NAME < VALUE", "update NAME < VALUE", "list", "remove NAME"}},
		{"top", "pipelines, queues, replicas and what happens, live in a terminal", cli.Top, nil},
		{"namespace", "where functions and secrets are apart from those of others", cli.Namespace, []string{"create NAME", "list", "remove NAME"}},
		{"pipeline", "pipelines of a running stagecoach and what is wrong with them", cli.Pipeline, []string{"list", "describe NAME"}},
		{"explain", "PIPELINE: why its stages are as large as they are: which term, from what to what, why not more", cli.Explain, nil},
		{"demand", "what was learned about an application's stages: work, batches, lengths, next stages", cli.Demand, []string{"describe NAME"}},
		{"replay", "FILE: decide again what `up --record FILE` recorded; any difference is an error", replay.Run, nil},
		{"decide", "PROBLEM.yml: one decision of any policy about a cluster in a file, and what it is worth", decide.Run, nil},
		{"node", "the nodes of a running stagecoach: what they have, which of them take replicas, and who may join", cli.Node, cli.NodeVerbs()},
		{"cache", "parameters that nodes hold in memory", cli.Cache, []string{"list", "warm FUNCTION", "evict FUNCTION|DIGEST"}},
		{"doctor", "what this machine lacks for a node (--node), or for `up --runtime containerd`", cli.Doctor{Version: version(), Probe: probeControl}.Run, nil},
		{"call", "ID: show the state and the result of an async call", cli.Call, nil},
		{"dead", "async requests and callbacks that failed for good", cli.Dead, []string{"list", "show ID", "redrive ID", "drop ID"}},
		{"watchdog", "what `up` runs functions of other kinds with: programs that speak HTTP, or that read and print", runWatchdog, nil},
		{"warden", "what `keysmanager` starts processes with, so that they outlive it", runWarden, nil},
		{"demo", "the main job end to end, on real input, with its result shown", demo.Run, nil},
		{"load", "FUNCTION --rate 20 | --scenario FILE | compare A.json B.json: open-loop load, with a report", cli.Load, nil},
		{"sim", "policies on virtual time, in seconds for days: the same code, on a modelled cluster", runSimulator, []string{"SCENARIO.yml", "--recorded RECORD", "paper quart"}},
		{"bench", "measure", runBench, []string{"autoscaler", "batch", "coldstart", "gpu", "hop", "idle", "keysmanager", "nodes", "nodes-scale", "scale", "sim", "wake"}},
		{"version", "print the version", runVersion, nil},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stagecoach:", err)
		os.Exit(console.StatusOf(err))
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		usage(out)
		return nil
	}
	if args[0] == sandbox.InitCommand {
		return sandbox.Init(args[1:])
	}
	if args[0] == "--version" {
		args = []string{"version"}
	}
	all := commands()
	i := slices.IndexFunc(all, func(c command) bool { return c.name == args[0] })
	if i < 0 {
		return fmt.Errorf("unknown command %q; `stagecoach help` lists them", args[0])
	}
	if c := all[i]; len(c.verbs) > 0 && !argument(c.verbs[0]) && len(args) > 1 && slices.Contains([]string{"help", "-h", "-help", "--help"}, args[1]) {
		for _, v := range c.verbs {
			fmt.Fprintf(out, "stagecoach %s %s\n", c.name, v)
		}
		return nil
	}
	err := all[i].run(ctx, args[1:], out)
	if help := (console.HelpAsked{}); errors.As(err, &help) {
		_, err = fmt.Fprint(out, all[i].help(args[1:], help.Text))
	}
	return err
}

// help returns the text of --help: the command's arguments, in place of the first line of package
// flag, and the flags.
func (c command) help(args []string, flags string) string {
	flags, plain := strings.CutPrefix(flags, "Usage of ")
	if !plain {
		return flags // flags is the whole text
	}
	_, flags, _ = strings.Cut(flags, "\n")
	line := ": " + c.summary
	if argument(c.summary) { // its arguments come first
		line = " " + c.summary
	}
	for _, v := range c.verbs {
		if argument(v) || strings.Fields(v)[0] == args[0] {
			line = " " + v
		}
	}
	return fmt.Sprintf("stagecoach %s%s\n%s", c.name, line, flags)
}

// argument reports whether text begins with a placeholder for an argument.
func argument(text string) bool { return text[0] <= 'Z' }

func usage(out io.Writer) {
	fmt.Fprintln(out, "Stagecoach serves pipelines of ML stages behind the OpenFaaS API.")
	fmt.Fprintln(out)
	width := 0
	for _, c := range commands() {
		width = max(width, len(c.name))
	}
	for _, c := range commands() {
		summary := c.summary
		if len(c.verbs) > 0 {
			summary = strings.Join(c.verbs, " | ") + ": " + summary
		}
		fmt.Fprintf(out, "  stagecoach %-*s  %s\n", width, c.name, summary)
	}
	fmt.Fprintln(out, "\nEach takes --help.")
}

func runVersion(_ context.Context, args []string, out io.Writer) error {
	if err := console.ParseFlags(flag.NewFlagSet("version", flag.ContinueOnError), args); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, "stagecoach", version())
	return err
}

// release is the version of an image's program. scripts/oci sets it; other builds leave it empty.
var release string

// version returns the release, or the module's version as the linker recorded it.
func version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
