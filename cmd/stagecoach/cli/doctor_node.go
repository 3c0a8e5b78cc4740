package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Control is what a control plane has answered.
type Control struct {
	Version       string
	Ahead, Margin time.Duration // of its clock, and the largest error of that
}

// Probe asks the control plane that listens at NATS. name is that of a node. The error is
// node.ErrNoControl if nothing answers there.
type Probe func(ctx context.Context, urls, token, name string) (Control, error)

// nodeDoctor are the flags of `doctor --node`.
type nodeDoctor struct {
	probe Probe

	node              bool
	join, token, name string
	state, uids       string
	listen, metrics   string
}

func (d *nodeDoctor) add(fs *flag.FlagSet) {
	fs.BoolVar(&d.node, "node", false, "look at all that a node needs of its machine")
	fs.StringVar(&d.join, "join", "", "URLs of NATS where the node would join, as keysmanager --join has them; with --node")
	fs.StringVar(&d.token, "nats-token", ".stagecoach/nats-token", "file with the token of that NATS; with --join")
	fs.StringVar(&d.name, "name", "", "name of the node; default the host's; with --join")
	fs.StringVar(&d.state, "state", ".stagecoach", "folder of the node; with --node")
	fs.StringVar(&d.uids, "uids", sandbox.DefaultRange.String(), "numbers of users and groups that functions run as; with --node")
	fs.StringVar(&d.listen, "listen", "", "host:port where the node would listen; with --node")
	fs.StringVar(&d.metrics, "metrics", "", "host:port of its metrics; with --node")
}

// Bounds of doctor --node.
const (
	joinTimeout = 5 * time.Second
	mostSkew    = time.Second // beyond which clocks are told to differ
	worstSkew   = time.Minute // beyond which certificates and deadlines fail
)

// look looks at everything that the flags name. version is that of this program.
func (d *nodeDoctor) look(ctx context.Context, m machine, version string) []diagnosis {
	out := m.all(d.uids, d.state)
	if d.listen != "" {
		out = append(out, port(ctx, "port", d.listen))
	}
	if d.metrics != "" {
		out = append(out, port(ctx, "metrics port", d.metrics))
	}
	if d.join == "" {
		return append(out, clock(time.Now()))
	}
	return append(out, d.control(ctx, version)...)
}

// control looks at the control plane: its address, its answer, its version and its clock.
func (d *nodeDoctor) control(ctx context.Context, version string) []diagnosis {
	address, reached := reach(ctx, d.join)
	if reached.State != checkOK {
		return []diagnosis{reached, clock(time.Now())}
	}
	token, err := os.ReadFile(d.token)
	if err != nil {
		return []diagnosis{reached, missing("token", err.Error(), "copy STATE/nats-token of the control plane here, and name it with --nats-token"), clock(time.Now())}
	}
	name := d.name
	if name == "" {
		name, _ = os.Hostname() // a name is enough, whichever it is
	}
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	p, err := d.probe(ctx, d.join, strings.TrimSpace(string(token)), cmp.Or(name, "doctor"))
	if err != nil {
		toDo := "look whether --nats-token is that of this control plane, and into the log of `stagecoach up`"
		if errors.Is(err, node.ErrNoControl) {
			toDo = "start `stagecoach up` of this release there"
		}
		return []diagnosis{reached, missing("control plane", fmt.Sprintf("%s: %v", address, err), toDo), clock(time.Now())}
	}
	return []diagnosis{reached, release(p.Version, version), skew(p.Ahead, p.Margin)}
}

// reach connects to the first address of a list of URLs that answers.
func reach(ctx context.Context, urls string) (string, diagnosis) {
	const check = "NATS"
	var last error
	for one := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" {
			return "", missing(check, fmt.Sprintf("%q is no URL", one), "write --join nats://HOST:PORT")
		}
		address := net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "4222"))
		c, err := (&net.Dialer{Timeout: joinTimeout}).DialContext(ctx, "tcp", address)
		if err == nil {
			_ = c.Close()
			return address, fine(check, "%s answers", address)
		}
		last = err
	}
	return "", missing(check, last.Error(), "start `stagecoach up --nats-listen` there, open the port in the firewall, or correct --join")
}

func release(theirs, ours string) diagnosis {
	if theirs != ours {
		return warning("control plane", fmt.Sprintf("version %s, this program is %s", theirs, ours), "run the same release everywhere")
	}
	return fine("control plane", "version %s, as this program", theirs)
}

// skew judges how far the control plane's clock is ahead of this one.
func skew(ahead, margin time.Duration) diagnosis {
	off := max(ahead.Abs()-margin, 0)
	found := fmt.Sprintf("%v from the control plane's, give or take %v", ahead.Round(time.Millisecond), margin.Round(time.Millisecond))
	const toDo = "keep both machines' clocks right with chrony or systemd-timesyncd"
	switch {
	case off > worstSkew:
		return missing("clock", found, toDo)
	case off > mostSkew:
		return warning("clock", found, toDo)
	}
	return fine("clock", "%s", found)
}

// ofContainerd returns what --runtime containerd needs, as diagnoses.
func ofContainerd(ctx context.Context, all []contained.Finding) (out []diagnosis) {
	for _, f := range all {
		d := diagnosis{Check: "containerd " + f.Check, State: checkOK, Found: f.Found}
		if !f.OK {
			d.State, d.ToDo = checkMissing, f.ToDo
		} else if f.Check == "runc" {
			d.Found += programVersion(ctx, f.Found)
		}
		out = append(out, d)
	}
	return out
}

// programVersion returns the first line of what a program says about its version, in brackets.
func programVersion(ctx context.Context, program string) string {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	b, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return " (" + strings.TrimSpace(line) + ")"
}

// reportAll prints diagnoses. It returns an error if something is missing.
func reportAll(all []diagnosis, asJSON bool, out io.Writer) error {
	lacks := 0
	t := console.NewTable(out)
	fmt.Fprintln(t, "CHECK\tSTATE\tFOUND\tTO DO")
	for _, d := range all {
		if d.State == checkMissing {
			lacks++
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", d.Check, d.State, d.Found, d.ToDo)
	}
	err := t.Flush
	if asJSON {
		err = func() error { return json.NewEncoder(out).Encode(all) }
	}
	if err := err(); err != nil {
		return err
	}
	if lacks > 0 {
		return fmt.Errorf("%d of %d checks failed: do what they say, then try again", lacks, len(all))
	}
	return nil
}
