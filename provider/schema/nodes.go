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
