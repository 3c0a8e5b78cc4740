package main

import (
	"regexp"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// cached is a parameter set in the memory of a node, as GET /system/cache shows it.
type cached struct {
	Node string `json:"node"`
	node.Zygote
}

// cacheOrder is the body of POST /system/cache/warm and POST /system/cache/evict.
type cacheOrder struct {
	Function  string `json:"function,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Digest    string `json:"digest,omitempty"` // evict: digest of an image or its beginning, instead of a function
	Node      string `json:"node,omitempty"`   // empty: all nodes; for evict, all nodes that have it
}

// cacheDone is the result of a [CacheOrder] on one node.
type cacheDone struct {
	Node  string `json:"node"`
	Bytes int64  `json:"bytes"` // that are in memory after warm, or were freed by evict
}

var digestForm = regexp.MustCompile(`^(sha256:)?[0-9a-f]{8,64}$`)

// isDigest reports whether text looks like the digest of an image or its beginning: eight or more
// hexadecimal digits, with or without sha256: before them.
func isDigest(text string) bool { return digestForm.MatchString(text) }
