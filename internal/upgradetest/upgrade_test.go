package upgradetest_test

import (
	"net/http"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// function returns a function whose image is stagecoach/IMAGE:0.1.0.
func function(name, image string, scale, annotations, env map[string]string) client.Deployment {
	d := client.Deployment{Service: name, Image: "stagecoach/" + image + ":0.1.0", EnvVars: env, Labels: map[string]string{}, Annotations: map[string]string{}}
	for k, v := range scale {
		d.Labels["com.openfaas.scale."+k] = v
	}
	for k, v := range annotations {
		d.Annotations[k] = v
	}
	return d
}

// deploy deploys functions of all kinds, with a secret, a learned demand and a dead letter.
func (c *cluster) deploy() {
	c.t.Helper()
	two, zero := map[string]string{"min": "2", "max": "4"}, map[string]string{"min": "0", "zero": "true", "zero-duration": "1s"}
	wait := map[string]string{"STAGECOACH_MODEL": "model/rec.onnx", "wait_mean": "20ms", "wait_cv": "0"}
	speaks := map[string]string{"fprocess": "./echo-http", "mode": "http"}
	chain := func(next string) map[string]string {
		a := map[string]string{"stagecoach.dev/pipeline": "chain"}
		if next != "" {
			a["stagecoach.dev/next"] = next
		}
		return a
	}
	secretive := function("secretive", "echo-http", two, nil, speaks)
	secretive.Secrets = []string{"key"}
	leader := c.leader()
	leader.must(http.MethodPost, "/system/secrets", nil, map[string]string{"name": "key", "value": "secret"})
	for _, d := range []client.Deployment{
		function("echo", "noop", two, nil, nil),
		function("plain", "noop", two, nil, nil),
		function("first", "noop", two, chain("second"), nil),
		function("second", "wait", two, chain(""), wait),
		function("asleep", "wait", zero, nil, wait),
		function("web", "echo-http", two, map[string]string{"com.openfaas.retry.attempts": "1"}, speaks),
		secretive,
	} {
		if err := leader.api().Deploy(c.t.Context(), d); err != nil {
			c.t.Fatal(err)
		}
	}
	if status, got, err := leader.at("/async-function/web/status?code=500", "x"); err != nil || status != http.StatusAccepted {
		c.t.Fatalf("async request: status %d, %v: %s", status, err, got)
	}
	proctest.Until(c.t, "a dead letter", func() bool { time.Sleep(50 * time.Millisecond); return len(c.deadLetters(leader)) == 1 })
	leader.must(http.MethodPost, "/system/nodes/right/cordon", nil, nil)
	leader.must(http.MethodPost, "/system/nodes/right/uncordon", nil, nil)
}

// change makes changes with this version that the previous one reads after the cluster has gone
// back: a function with a secret, and a change of a function that the previous version has stored.
func (c *cluster) change() {
	c.t.Helper()
	leader := c.leader()
	leader.must(http.MethodPost, "/system/secrets", nil, map[string]string{"name": "late", "value": "secret of this version"})
	speaks := map[string]string{"fprocess": "./echo-http", "mode": "http"}
	late := function("late", "echo-http", map[string]string{"min": "1"}, nil, speaks)
	late.Secrets = []string{"late"}
	for _, d := range []client.Deployment{late, function("plain", "noop", map[string]string{"min": "1", "max": "3"}, nil, map[string]string{"changed": "yes"})} {
		var err error
		proctest.Until(c.t, "a deploy to be taken, also by a busy cluster", func() bool {
			err = leader.api().Deploy(c.t.Context(), d)
			return err == nil || !strings.Contains(err.Error(), "try again")
		})
		if err != nil {
			c.t.Fatal(err)
		}
	}
	c.share()
}

// share copies the secrets of the control plane that leads to the others, as operators have to do
// without a cluster key.
func (c *cluster) share() {
	c.t.Helper()
	leader := c.leader()
	for _, p := range c.controls {
		if p == leader {
			continue
		}
		if out, err := exec.Command("cp", "-a", filepath.Join(leader.state, "secrets"), p.state).CombinedOutput(); err != nil {
			c.t.Fatalf("%v: %s", err, out)
		}
	}
}

// deadLetters returns the ids of dead letters.
func (c *cluster) deadLetters(p *process) []string {
	c.t.Helper()
	var all struct{ Letters []struct{ ID string } }
	p.must(http.MethodGet, "/system/dead", &all, nil)
	out := []string{}
	for _, d := range all.Letters {
		out = append(out, d.ID)
	}
	return out
}

// stored is what a control plane says about what the cluster stores.
type stored struct {
	Functions, Secrets []string
	Dead               []string
}

// look asks a control plane for all that is stored.
func (c *cluster) look(p *process) stored {
	c.t.Helper()
	var s stored
	for path, into := range map[string]*[]string{"/system/functions": &s.Functions, "/system/secrets": &s.Secrets} {
		var all []struct{ Name, Image string }
		p.must(http.MethodGet, path, &all, nil)
		for _, one := range all {
			*into = append(*into, one.Name+" "+one.Image)
		}
	}
	s.Dead = c.deadLetters(p)
	return s
}

// step replaces one process by a version of the program.
type step func(c *cluster, l *load, to program)

var (
	standby step = func(c *cluster, l *load, to program) {
		p := c.standby()
		l.replace("standby "+p.name+" -> "+to.name, false, func() {
			p.stop()
			p.run(to.path)
			p.stands()
		})
	}
	leader step = func(c *cluster, l *load, to program) {
		p := c.leader()
		l.replace("leader "+p.name+" -> "+to.name, true, func() {
			p.stop()
			if c.leader() == p {
				c.t.Errorf("%s leads after its end", p.name)
			}
			p.run(to.path)
			p.stands()
		})
	}
	// There is no other control plane.
	only step = func(c *cluster, l *load, to program) {
		p := c.controls[0]
		l.replace("control plane -> "+to.name, true, func() {
			p.stop()
			p.run(to.path)
			for _, d := range c.daemons {
				c.ready(d)
			}
		})
	}
	// Its replicas go on, unless it is on another machine.
	killed step = func(c *cluster, l *load, to program) {
		d := c.daemons[0]
		l.replace("daemon "+d.name+" (killed) -> "+to.name, false, func() {
			d.kill()
			d.run(to.path)
			c.ready(d)
		})
	}
	// Its replicas move.
	drained step = func(c *cluster, l *load, to program) {
		d := c.daemons[1]
		l.replace("daemon "+d.name+" (drained) -> "+to.name, false, func() {
			d.stop()
			d.run(to.path)
			c.ready(d)
		})
	}
)

// TestRollingUpgrade replaces the processes of a cluster of the previous version with this one, one
// after the other and under load, and goes back. No accepted async request may be lost. Sync
// requests may fail only while the leader is replaced, with 502 or 503.
func TestRollingUpgrade(t *testing.T) {
	for name, is := range map[string]struct {
		start       func(*testing.T, string) *cluster
		there, back []step
	}{
		// As docs/howto-nodes.md says.
		"control planes first": {startOutside, []step{standby, leader, killed, drained}, []step{killed, drained, standby, leader}},
		// The other way round.
		"daemons first": {startOutside, []step{killed, drained, standby, leader}, []step{standby, leader, killed, drained}},
		"NATS inside":   {startInside, []step{only, killed, drained}, []step{only, killed, drained}},
	} {
		t.Run(name, func(t *testing.T) {
			v := programs(t)
			c := is.start(t, v.old.path)
			c.deploy()
			c.share()
			want := c.look(c.leader())
			l := c.run(t)
			l.replace("nothing", false, func() {})
			for i, to := range []program{v.new, v.old} {
				for _, replace := range [][]step{is.there, is.back}[i] {
					replace(c, l, to)
					for _, p := range c.controls {
						if got := c.look(p); !reflect.DeepEqual(got, want) {
							t.Errorf("%s says that %+v is stored, want %+v", p.name, got, want)
						}
					}
				}
				if to == v.new {
					c.change()
					want = c.look(c.leader())
					l.add(kind{path: "/function/late", answer: `"secrets":{"late":"22 bytes"}`})
				}
			}
			l.end()
		})
	}
}
