package node

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// kindProbe is the kind of messages that ask for a [Probed].
const kindProbe = "probe"

// probeAgain is the pause between attempts of Probe.
const probeAgain = 250 * time.Millisecond

// ErrNoControl means that no control plane listens.
var ErrNoControl = errors.New("node: no control plane answers")

// Probed is what a control plane answers to a machine that may become a node.
type Probed struct {
	V       int       `json:"v"`
	At      time.Time `json:"at"`      // by its clock
	Boot    string    `json:"boot"`    // boot id of its machine
	Version string    `json:"version"` // of the program
}

// Probe asks the control plane on a bus for its clock and version. It returns how far that clock
// is ahead of this process's clock, and the largest error of that number. Nothing is left of the
// question: the name need not be that of a node.
func Probe(ctx context.Context, bus Bus, name string) (p Probed, ahead, margin time.Duration, err error) {
	type answer struct {
		Probed
		at time.Time
	}
	answers, nobody := make(chan answer, 1), make(chan struct{}, 1)
	kind := kindAnswer + rand.Text()
	stop, err := bus.Listen(name, kind, func(_, _ string, data []byte) {
		var p Probed
		switch {
		case len(data) == 0:
			select {
			case nobody <- struct{}{}:
			default:
			}
		case open(data, &p) == nil:
			select {
			case answers <- answer{p, time.Now()}:
			default:
			}
		}
	})
	if err != nil {
		return p, 0, 0, err
	}
	defer stop()
	for {
		asked := time.Now()
		sent := bus.Send(name, kindProbe, kind, []byte(`{"v":1}`))
		var again <-chan time.Time // not while an answer may be on its way: it would seem too quick
		if sent != nil {
			again = time.After(probeAgain)
		}
		select {
		case a := <-answers:
			trip := a.at.Sub(asked)
			return a.Probed, a.At.Sub(asked.Add(trip / 2)), trip / 2, nil
		case <-nobody:
			return p, 0, 0, ErrNoControl
		case <-again:
		case <-ctx.Done():
			if sent == nil {
				sent = context.Cause(ctx)
			}
			return p, 0, 0, fmt.Errorf("probe: %w", sent)
		}
	}
}

// AnswerProbes answers each [Probe] on a bus until stop is called. boot and version are those of
// this process.
func AnswerProbes(bus Bus, boot, version string) (stop func(), err error) {
	return bus.Listen("", kindProbe, func(name, reply string, _ []byte) {
		b, err := json.Marshal(Probed{V: Version, At: time.Now().UTC(), Boot: boot, Version: version})
		if err == nil && reply != "" {
			_ = bus.Send(name, reply, "", b) // who waits asks again
		}
	})
}
