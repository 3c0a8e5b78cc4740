package kube

import (
	"context"
	"fmt"
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

func (s Secret) String() string { return s.Namespace + "/" + s.Name }

// Value returns the value of a key; nil: the Secret does not have the key.
func (c *Client) Value(ctx context.Context, s Secret, key string) ([]byte, error) {
	o, err := c.Secret(ctx, s)
	return o.Data[key], err
}

// SetValue sets the value of a key. The other keys of the Secret stay.
func (c *Client) SetValue(ctx context.Context, s Secret, key string, value []byte) error {
	return c.patchObject(ctx, s.objects(), s.Name, map[string]any{"data": map[string][]byte{key: value}})
}
