package dispatch

import (
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// detach replaces references to the frame's files in an output. References to items that the
// replica's node keeps stay.
func (l *link) detach(a tensor.Activation, frame wire.Frame) (tensor.Activation, error) {
	if !frame.Kept {
		return wire.Detach(a, frame.Files)
	}
	if l.at == nil {
		return nil, errors.New("references to items of a node, from a replica of this machine")
	}
	a, err := wire.DetachKept(a, frame.Files)
	if err != nil {
		return nil, err
	}
	for i := range a {
		ref := a[i].Ref
		if ref == nil {
			continue
		}
		if ref.Node != l.at.Node {
			return nil, fmt.Errorf("item %d is said to be with node %q, want the replica's node %q", i, ref.Node, l.at.Node)
		}
		ref.Address = l.at.Address // nodes do not choose what others dial
	}
	return a, nil
}

// keeps reports whether the outputs of a batch's calls may stay on the node: either all of them or
// none. A coordinator in this process can fetch any output from the node, but prefers to get the
// answers of requests at once. A coordinator in another process would get the outputs whole in a
// message. So if the batch has tasks of other processes, those tasks decide.
func (c *Config) keeps(batch []*task.Task) bool {
	all, apart := true, false
	for _, t := range batch {
		if t.Keep {
			apart = apart || c.apart(t)
		} else if all = false; c.apart(t) {
			return false
		}
	}
	return all || apart
}

// apart reports whether a task's coordinator is in another process.
func (c *Config) apart(t *task.Task) bool { return c.Apart != nil && c.Apart(t.ReplyTo) }

// owned returns an error if an output has items of another request.
func owned(r *task.Reply) error {
	for i := range r.Output {
		if ref := r.Output[i].Ref; ref != nil && ref.Node != "" && ref.Owner != r.Request {
			return fmt.Errorf("output: item %d, which node %q keeps, belongs to request %q", i, ref.Node, ref.Owner)
		}
	}
	return nil
}
