package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Node lists and describes nodes, changes which of them take replicas, and lets nodes join.
func Node(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 || !slices.ContainsFunc(NodeVerbs(), func(v string) bool { return strings.Fields(v)[0] == args[0] }) {
		return fmt.Errorf("node: got %q, want one of: %s", args, strings.Join(NodeVerbs(), ", "))
	}
	switch args[0] {
	case "token":
		if len(args) > 1 && args[1] == "revoke" {
			return nodeTokenRevoke(ctx, args[2:], out)
		}
		return nodeToken(ctx, args[1:], out)
	case "tokens":
		return nodeTokens(ctx, args[1:], out)
	case "revoke":
		return nodeRevoke(ctx, args[1:], out)
	}
	fs := flag.NewFlagSet("node "+args[0], flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	asJSON, drain := new(bool), drainFlags{}
	switch args[0] {
	case "list", "describe":
		asJSON = console.JSONFlag(fs)
	case "drain":
		drain.add(fs)
	}
	rest, err := console.ParseMixed(fs, args[1:])
	if err != nil {
		return err
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	if args[0] == "list" {
		if len(rest) > 0 {
			return fmt.Errorf("node list: got argument %q, want flags alone", rest[0])
		}
		all := []schema.Node{}
		err := api.Get(ctx, "/system/nodes", &all)
		if *asJSON && err == nil {
			return json.NewEncoder(out).Encode(all)
		}
		if err == nil {
			err = listNodes(all, out)
		}
		if *asJSON {
			return err
		}
		return errors.Join(err, listPlanes(ctx, api, out)) // also if no control plane leads
	}
	if len(rest) != 1 {
		return fmt.Errorf("node %s: got %q, want one name", args[0], rest)
	}
	switch args[0] {
	case "drain":
		return drainNode(ctx, api, rest[0], drain, out)
	case "cordon", "uncordon", "remove":
		return changeNode(ctx, api, args[0], rest[0], out)
	}
	var n schema.Node
	if err := api.Get(ctx, "/system/nodes/"+url.PathEscape(rest[0]), &n); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(out).Encode(n)
	}
	return describeNode(n, time.Now(), out)
}

func listNodes(all []schema.Node, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintln(t, "NODE\tKIND\tSTATUS\tCPU\tMEMORY\tUSED\tDEVICES\tCACHED\tREPLICAS\tHITS\tMISSES\tLINK")
	for _, n := range all {
		devices, ill := fmt.Sprint(len(n.Devices)), 0
		for _, d := range n.Devices {
			if !d.Healthy {
				ill++
			}
		}
		if ill > 0 {
			devices += fmt.Sprintf(" (%d not well)", ill)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%dm\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n",
			n.Name, nodeKind(n.Inventory), nodeStatus(n), n.CPU.Total, plan.Size(n.Memory.Total), plan.Size(n.Memory.Used), devices, len(n.Zygotes), len(n.Replicas), n.Counts.Hits, n.Counts.Misses, cmp.Or(n.Link, "-"))
	}
	return t.Flush()
}

// listPlanes lists the control planes, if there can be several.
func listPlanes(ctx context.Context, api *client.Client, out io.Writer) error {
	var all []schema.ControlPlane
	if err := api.Get(ctx, "/system/control-planes", &all); err != nil || len(all) == 0 {
		return nil //nolint:nilerr // an earlier release has none
	}
	t := console.NewTable(out)
	fmt.Fprintln(t, "\nCONTROL PLANE\tSTATUS\tLISTENS\tID\tCAUSE")
	for _, p := range all {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", p.Name, p.Status, p.Listen, p.ID, cmp.Or(p.Cause, "-"))
	}
	return t.Flush()
}

// nodeKind returns how a node runs: as a daemon or inside up.
func nodeKind(n node.Inventory) string {
	kind := "daemon"
	if n.Embedded {
		kind = "up"
	}
	return kind
}

// nodeStatus returns the status of a node, since when it has been away, and what its machine is
// closed for.
func nodeStatus(n schema.Node) string {
	status := cmp.Or(n.Status, schema.NodeReady)
	if n.Away() {
		if !n.Since.IsZero() {
			status += " since " + n.Since.UTC().Format(time.DateTime)
		}
		if n.Cordoned {
			status += ", cordoned"
		}
	}
	if n.Machine != "" {
		status += ": " + n.Machine
	}
	return status
}

// nodeAddress returns where up reaches a daemon, and how.
func nodeAddress(n node.Inventory) string {
	at := cmp.Or(n.Address, n.Socket)
	if n.Link == node.LinkUnix {
		at = n.Socket
	}
	return fmt.Sprintf("%s, %s", at, cmp.Or(n.Link, "not reached"))
}

func describeNode(n schema.Node, now time.Time, out io.Writer) error {
	t := console.NewTable(out)
	status := nodeStatus(n)
	if (n.Cordoned || n.Machine != "") && !n.Away() && !n.Since.IsZero() {
		status += fmt.Sprintf(", for %s", age(n.Since, now))
	}
	if n.Cause != "" {
		status += "; " + n.Cause
	}
	fmt.Fprintf(t, "Node:\t%s\nKind:\t%s\nStatus:\t%s\nProcess:\t%d on %s, version %s, for %s\n", n.Name, nodeKind(n.Inventory), status, n.PID, n.Host, n.Version, age(n.Started, now))
	if n.Address != "" || n.Socket != "" {
		fmt.Fprintf(t, "Address:\t%s\n", nodeAddress(n.Inventory))
	}
	fmt.Fprintf(t, "CPU:\t%dm, %dm promised\n", n.CPU.Total, n.CPU.Used)
	fmt.Fprintf(t, "Memory:\t%s (%s), %s used; idle parameters go above %s\n", plan.Size(n.Memory.Total), n.Memory.Bound, plan.Size(n.Memory.Used), plan.Size(n.Memory.Threshold))
	fmt.Fprintf(t, "Cache:\t%d hits, %d misses, %d evictions, %d refused\n", n.Counts.Hits, n.Counts.Misses, n.Counts.Evictions, n.Counts.Refused)
	if len(n.Devices) > 0 {
		fmt.Fprintln(t, "\nDEVICE\tUUID\tNAME\tMEMORY\tUSED\tRESERVED\tPARKED\tFREE\tBUSY\tTEMPERATURE\tPOWER\tSTATE")
	}
	for _, d := range n.Devices {
		busy, warmth, power := "?", "?", "?"
		if d.Utilisation >= 0 {
			busy = fmt.Sprintf("%.0f%%", 100*d.Utilisation)
		}
		if d.Temperature > 0 {
			warmth = fmt.Sprintf("%d °C", d.Temperature)
		}
		if d.Power > 0 {
			power = fmt.Sprintf("%.0f W", d.Power)
		}
		state := "well"
		if !d.Healthy {
			state = d.Cause
		}
		parked := plan.Size(d.Parked)
		if len(d.ParkedFor) > 0 {
			parked += " (" + strings.Join(d.ParkedFor, ", ") + ")"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Index, d.UUID, d.Name, plan.Size(d.Memory), plan.Size(d.Used), plan.Size(d.Reserved), parked, plan.Size(d.Free), busy, warmth, power, state)
	}
	if len(n.Zygotes) > 0 {
		fmt.Fprintln(t, "\nCACHED FOR\t"+zygoteHead)
	}
	for _, z := range n.Zygotes {
		zygoteRow(t, z, now)
	}
	if len(n.Failures) > 0 {
		fmt.Fprintln(t, "\nNOT LOADED FOR\tFAILURES\tNEXT TRY\tCAUSE")
	}
	for _, f := range n.Failures {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\n", f.Function, f.Count, f.Retry.UTC().Format(time.TimeOnly), f.Cause)
	}
	if len(n.Replicas) > 0 {
		fmt.Fprintln(t, "\nREPLICA\tPID\tPATH\tDEVICE\tCPU\tTHROTTLED\tMEMORY\tAGE")
	}
	for _, r := range n.Replicas {
		replicaRow(t, r, now)
	}
	if len(n.Containers) > 0 {
		fmt.Fprintln(t, "\nCONTAINER\tFUNCTION\tPID\tFOR\tCLASS")
	}
	for _, c := range n.Containers {
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\n", c.ID, c.Function, c.PID, c.Replica, cmp.Or(c.Class, "-"))
	}
	return t.Flush()
}

func replicaRow(t *tabwriter.Writer, r node.Replica, now time.Time) {
	cpu, throttled, memory := "?", "?", "?"
	if r.Usage != nil {
		cpu, throttled, memory = fmt.Sprintf("%dm", r.Usage.CPUMilli), r.Usage.Throttled.Round(time.Millisecond).String(), plan.Size(r.Usage.Memory)
	}
	if r.CPUMilli > 0 {
		cpu += fmt.Sprintf(" of %dm", r.CPUMilli)
	}
	fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Name, r.PID, r.Path, cmp.Or(r.Device, "-"), cpu, throttled, memory, age(r.Started, now))
}

const zygoteHead = "DIGEST\tSIZE\tREPLICAS\tSTATE\tPATH\tKEY\tLAST USED"

func zygoteRow(t *tabwriter.Writer, z node.Zygote, now time.Time) {
	used := "never"
	if !z.LastUsed.IsZero() {
		used = age(z.LastUsed, now) + " ago"
	}
	if z.Worker != "" {
		z.Function, z.Digest = fmt.Sprintf("worker %s, %s", z.Worker, z.Namespace), cmp.Or(z.Device, "-")
	}
	digest := strings.TrimPrefix(z.Digest, "sha256:")
	fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%t\t%s\n", z.Function, digest[:min(len(digest), shortDigest)], plan.Size(z.Bytes), z.Replicas, z.State, cmp.Or(z.Path, "?"), z.Key, used)
}

// shortDigest is the length of a digest in tables.
const shortDigest = 12

// age formats the time since then in a suitable unit.
func age(then, now time.Time) string {
	d := now.Sub(then)
	switch {
	case d < time.Minute:
		return max(d, 0).Round(time.Second).String()
	case d < time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Hour).String(), "0m0s")
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
