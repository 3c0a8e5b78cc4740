package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// nodesWithin is how long a control plane that begins to lead waits for the nodes of the one before
// it. Until they have said what they run, a plan would start their replicas again.
const nodesWithin = 2500 * time.Millisecond

// joiningNodes returns whether nodes may join, and whether they may have replicas of an earlier
// control plane.
func joiningNodes(u *up) cluster.Joining {
	switch {
	case u.leading.outside():
		return cluster.NodesJoinWithReplicas
	case u.cfg.NATS.joining():
		return cluster.NodesJoin
	}
	return cluster.NoNodesJoin
}

// standBy listens to nodes while another control plane leads.
func (n *nodes) standBy() (err error) {
	n.standby, err = node.Listen(n.bus)
	return err
}

// heardStandingBy returns the latest announcements of the nodes, and stops listening.
func (n *nodes) heardStandingBy() map[string][]byte {
	if n.standby == nil {
		return nil
	}
	n.standby.Close()
	return n.standby.Heard(nodesWithin)
}

// await waits until all nodes that were heard have joined. If the process has just started, await
// first waits until all nodes can have been heard.
func (n *nodes) await(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, nodesWithin)
	defer cancel()
	if missing := n.joined.Load().Await(ctx, n.standby.Complete()); len(missing) > 0 {
		n.log.Warn("nodes that were there have not joined; their replicas are started elsewhere", "nodes", missing, "waited", nodesWithin)
	}
}

// homeOf returns a text for what the replicas of a function use of their control plane's machine:
// its gateway and its folder of secrets. Another control plane can take the replicas over if the
// text is the same for it. If the control plane is on another machine, the node gives replicas its
// own gateway and secrets. Some nodes also have an address of their own where functions call
// functions.
func homeOf(s node.Spec, c *node.Client) string {
	if c.Far() {
		return "far"
	}
	gateway, secrets := "", ""
	if c.Inventory().Inside == "" && (s.Network == "" || s.Network == pipeline.NetworkDefault) {
		gateway = s.Gateway
	}
	if s.Secrets != "" {
		secrets = fmt.Sprint(s.Group, s.Secrets)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q", gateway, secrets))
	return "near " + hex.EncodeToString(sum[:8])
}

// offers returns the replicas of a node that outlive their control plane.
func offers(inv node.Inventory) (out []cluster.Offer) {
	for _, r := range inv.Replicas {
		if r.Kept {
			out = append(out, cluster.Offer{
				Replica: r.Name, Function: pipeline.ParseKey(r.Function), Revision: r.Revision, Home: r.Home, Device: r.Device, CPUMilli: r.CPUMilli, Path: r.Path,
			})
		}
	}
	return out
}

// errHome means that a replica cannot be taken over.
var errHome = errors.New("it uses the gateway or the secrets of the control plane that has started it")

// Adopt implements cluster.Adopter.
func (n remoteNode) Adopt(ctx context.Context, o cluster.Offer, spec cluster.FunctionSpec) (wire.Socket, error) {
	home := homeOf(spec.Spec, n.Client)
	if o.Home != home {
		return nil, fmt.Errorf("take over replica %q: %w", o.Replica, errHome)
	}
	return n.Client.Adopt(ctx, node.Order{Replica: o.Replica, Spec: spec.Spec, Claim: node.Claim{Revision: spec.Revision, Home: home}})
}
