package identity

import (
	"encoding/json"
	"fmt"
	"time"
)

// Version is the version of the messages between a process and the authority.
const Version = 1

// Kinds of messages. A process that joins sends an Ask of KindJoin about its token. A node sends an
// Ask of KindIdentity about itself. The authority answers with an Answer, and sends Answers of
// KindRevoked after a revocation.
const (
	KindJoin     = "ask"
	KindIdentity = "identity"
	KindRevoked  = "revoked"
	KindAnswer   = "answer." // plus an id
)

// Ask asks the authority for a certificate. Without a Request, it asks only for what is revoked.
type Ask struct {
	V       int       `json:"v"`
	Name    string    `json:"name"`
	Secret  string    `json:"secret,omitempty"`  // of a join token; empty: the node is a member
	Request []byte    `json:"request,omitempty"` // PKCS #10
	User    string    `json:"user,omitempty"`    // public key of the node's NATS user
	Time    time.Time `json:"time"`              // by the node's clock
}

// Answer is the authority's answer. If Error is empty, an Ask with a Request has been granted.
type Answer struct {
	V           int       `json:"v"`
	Error       string    `json:"error,omitempty"`
	Certificate []byte    `json:"certificate,omitempty"` // X.509
	CA          []byte    `json:"ca,omitempty"`          // X.509
	User        string    `json:"user,omitempty"`        // token of the node's NATS user
	Revoked     []Revoked `json:"revoked,omitempty"`     // all that would be valid otherwise
	Time        time.Time `json:"time"`                  // by the authority's clock
}

// Revoked is a certificate that is not valid any more.
type Revoked struct {
	Serial string    `json:"serial"`
	Name   string    `json:"name"`
	Until  time.Time `json:"until"` // after that, it would have expired
}

// DecodeAsk reads an Ask. If the version is another one, the error says so.
func DecodeAsk(b []byte) (Ask, error) {
	var a Ask
	err := decode(b, &a, func() int { return a.V })
	return a, err
}

// DecodeAnswer reads an Answer.
func DecodeAnswer(b []byte) (Answer, error) {
	var a Answer
	err := decode(b, &a, func() int { return a.V })
	return a, err
}

func decode(b []byte, into any, version func() int) error {
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("identity: a message of %d bytes that cannot be read: %w", len(b), err)
	}
	if v := version(); v != Version {
		return fmt.Errorf("identity: a message of version %d, want %d: use the same release on both sides", v, Version)
	}
	return nil
}

// Away is how long after the end of its certificate a node may still connect to NATS, where it
// renews the certificate. After that, it needs a join token.
const Away = 30 * 24 * time.Hour

// MaxSkew is how far two clocks may differ.
const MaxSkew = 5 * time.Minute

// Backdate is how long before its issue a certificate is valid. It is more than MaxSkew, for what
// takes time between two readings of a clock.
const Backdate = 2 * MaxSkew

// Skew describes how a node's clock differs from the control plane's; empty: by no more than
// MaxSkew.
func Skew(node string, nodes, controls time.Time) string {
	ahead := nodes.Sub(controls).Round(time.Second)
	word := "ahead of"
	if ahead < 0 {
		ahead, word = -ahead, "behind"
	}
	if ahead <= MaxSkew {
		return ""
	}
	return fmt.Sprintf("clock of node %s is %v %s the control plane's; set the clock", node, ahead, word)
}
