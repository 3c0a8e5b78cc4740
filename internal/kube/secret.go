package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// Secret names a Secret.
type Secret struct{ Namespace, Name string }

// ParseSecret reads NAMESPACE/NAME.
func ParseSecret(text string) (Secret, error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return Secret{}, fmt.Errorf("%q, want NAMESPACE/NAME of a Secret", text)
	}
	return Secret{namespace, name}, nil
}

func (s Secret) path() string {
	return "/api/v1/namespaces/" + url.PathEscape(s.Namespace) + "/secrets/" + url.PathEscape(s.Name)
}

func (s Secret) String() string { return s.Namespace + "/" + s.Name }

// secretObject is the part of a Secret that this package uses.
type secretObject struct {
	Data map[string][]byte `json:"data"`
}

// Value returns the value of a key; nil: the Secret does not have the key.
func (c *Client) Value(ctx context.Context, s Secret, key string) ([]byte, error) {
	b, err := c.do(ctx, http.MethodGet, s.path(), "", nil)
	var o secretObject
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		return nil, fmt.Errorf("kube: get secret %s: %w", s, err)
	}
	return o.Data[key], nil
}

// SetValue sets the value of a key. The other keys of the Secret stay.
func (c *Client) SetValue(ctx context.Context, s Secret, key string, value []byte) error {
	b, err := json.Marshal(secretObject{map[string][]byte{key: value}})
	if err == nil {
		_, err = c.do(ctx, http.MethodPatch, s.path(), mergePatch, b)
	}
	if err != nil {
		return fmt.Errorf("kube: patch secret %s: %w", s, err)
	}
	return nil
}
