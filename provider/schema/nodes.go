package schema

import (
	"regexp"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// Cached is a parameter set in the memory of a node, as GET /system/cache shows it.
type Cached struct {
	Node string `json:"node"`
	node.Zygote
}

// CacheOrder is the body of POST /system/cache/warm and POST /system/cache/evict.
type CacheOrder struct {
	Function  string `json:"function,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	// evict: digest of an image or its beginning, instead of a function
	Digest string `json:"digest,omitempty"`
	Node   string `json:"node,omitempty"` // empty: all nodes; for evict, all nodes that have it
}

// CacheDone is the result of a [CacheOrder] on one node.
type CacheDone struct {
	Node  string `json:"node"`
	Bytes int64  `json:"bytes"` // that are in memory after warm, or were freed by evict
}

var digestForm = regexp.MustCompile(`^(sha256:)?[0-9a-f]{8,64}$`)

// IsDigest reports whether text looks like the digest of an image or its beginning: eight or more
// hexadecimal digits, with or without sha256: before them.
func IsDigest(text string) bool { return digestForm.MatchString(text) }

// JoinTokenOrder is the body of POST /system/nodes/tokens.
type JoinTokenOrder struct {
	Name string   `json:"name,omitempty"` // of the only node that the token is for; empty: any node
	TTL  Duration `json:"ttl,omitempty"`  // 0: the token does not expire
	Uses int      `json:"uses,omitempty"` // how many nodes may join with it; 0: without end
}

// JoinToken is a new join token. Token is the secret text that `stagecoach keysmanager --token`
// takes.
type JoinToken struct {
	Token   string    `json:"token"`
	ID      string    `json:"id"`
	Cluster string    `json:"cluster"`
	Expires time.Time `json:"expires,omitzero"`
}

// JoinTokenInfo is what is known of a join token. It has no secret.
type JoinTokenInfo struct {
	ID      string    `json:"id"`
	Name    string    `json:"name,omitempty"` // of the only node that it is for; empty: any node
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
	Uses    int       `json:"uses,omitempty"`   // how many nodes may join with it; 0: without end
	Used    int       `json:"used"`             // how many have
	Local   bool      `json:"local,omitempty"`  // it is the one in the state folder of `up`
}

// Duration is a time in JSON as text, such as "1h".
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = Duration(parsed)
	return err
}

// The values of [Node.Status].
const (
	NodeReady    = "ready"
	NodeCordoned = "cordoned" // it takes no new replicas
	NodeDraining = "draining" // its replicas go elsewhere
	NodeDrained  = "drained"  // it has no replicas and takes none
	NodeLeaving  = "leaving"  // its daemon is being stopped
	NodeSilent   = "silent"   // its daemon is not heard
	// Its daemon is heard over NATS, but the leader cannot connect to it. It takes no new replicas.
	NodeUnreachable = "unreachable"
)

// Node is a node, as GET /system/nodes shows it.
type Node struct {
	node.Inventory // of a silent node: its latest; without anything but the name if there is none

	Status string `json:"status"`
	// Since when the node has been away, or cordoned; zero: unknown, or the node is ready.
	Since time.Time `json:"since,omitzero"`
	// An operator has closed the node to new replicas. A node that is away can be cordoned, too.
	Cordoned bool   `json:"cordoned,omitempty"`
	Cause    string `json:"cause,omitempty"` // why it is away
	// Why its machine takes no new work, such as "its machine is cordoned". The node is drained then.
	Machine string `json:"machine,omitempty"`
}

// Away reports whether the node is silent or out of reach.
func (n Node) Away() bool { return n.Status == NodeSilent || n.Status == NodeUnreachable }

// The values of [ControlPlane.Status].
const (
	PlaneLeads    = "leads"
	PlaneStandsBy = "stands by"     // it takes over if the leader ends
	PlaneLacks    = "lacks secrets" // it stands by, and does not take over before it has them
	PlaneLapsed   = "lapsed"        // it has led, and may not act until it holds the lease again
)

// ControlPlane is a control plane of a cluster, as GET /system/control-planes shows it.
type ControlPlane struct {
	Name   string   `json:"name"`
	ID     string   `json:"id"`     // of the process
	Listen string   `json:"listen"` // its API
	Status string   `json:"status"`
	Lacks  []string `json:"lacks,omitempty"` // some of the secrets that it lacks, as namespace/name
	Cause  string   `json:"cause,omitempty"` // of the status
}

// DrainOrder is the body of POST /system/nodes/NAME/drain. The body may be empty.
type DrainOrder struct {
	KeepParameters bool `json:"keepParameters,omitempty"` // without it, they are evicted
	Force          bool `json:"force,omitempty"`          // end the replicas that are left
}

// Drain says how far the drain of a node is.
type Drain struct {
	Node       string      `json:"node"`
	Done       bool        `json:"done"`
	Replicas   int         `json:"replicas"`   // that are left
	Parameters int         `json:"parameters"` // parameter sets that are left and have to go
	Waits      []DrainWait `json:"waits"`      // at most one per function and call
}

// DrainWait is what the drain of a node waits for.
type DrainWait struct {
	Function string    `json:"function,omitempty"`
	Replica  string    `json:"replica,omitempty"`
	Call     string    `json:"call,omitempty"` // id of the request whose call still runs
	Since    time.Time `json:"since,omitzero"` // of the call
	Why      string    `json:"why"`
}
