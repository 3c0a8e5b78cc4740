// Package kube reads and writes Secrets of Kubernetes from inside a pod. It talks to the API server
// with the pod's service account, and needs no library of Kubernetes.
package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// accountFolder is where a pod has the credentials of its service account.
const accountFolder = "/var/run/secrets/kubernetes.io/serviceaccount"

// maxAnswer bounds an answer of the API server, in bytes. A Secret has at most 1 MiB.
const maxAnswer = 4 << 20

// ErrNoPod means that this process does not run in a pod with a service account.
var ErrNoPod = errors.New("kube: this process is not in a pod that has a service account's token")

// Client calls the API server. It is safe for concurrent use.
type Client struct {
	base    string // URL of the API server
	account string // folder with the file token, which the kubelet renews
	http    *http.Client
}

// InPod returns a client for the API server of the cluster that this pod belongs to.
func InPod() (*Client, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, fmt.Errorf("%w: KUBERNETES_SERVICE_HOST is not set", ErrNoPod)
	}
	return New("https://"+net.JoinHostPort(host, port), accountFolder)
}

// New returns a client for the API server at a URL. account is a folder with a service account's
// credentials: the files token and ca.crt, the certificate of the API server's authority.
func New(base, account string) (*Client, error) {
	ca, err := os.ReadFile(filepath.Join(account, "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoPod, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("kube: %s/ca.crt has no certificate", account)
	}
	// With its own TLS configuration, it speaks HTTP/1.1: a request that has timed out closes its
	// connection. With HTTP/2, a dead connection would be used again.
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}, IdleConnTimeout: time.Minute}
	return &Client{base, account, &http.Client{Transport: transport, Timeout: 20 * time.Second}}, nil
}

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

// secretObject is the part of a Secret that this package uses.
type secretObject struct {
	Data map[string][]byte `json:"data"`
}

// Value returns the value of a key; nil: the Secret does not have the key.
func (c *Client) Value(ctx context.Context, s Secret, key string) ([]byte, error) {
	b, err := c.do(ctx, http.MethodGet, s, "", nil)
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
		_, err = c.do(ctx, http.MethodPatch, s, "application/merge-patch+json", b)
	}
	if err != nil {
		return fmt.Errorf("kube: patch secret %s: %w", s, err)
	}
	return nil
}

// do sends a request about a Secret, and returns the answer's body.
func (c *Client) do(ctx context.Context, method string, s Secret, kind string, body []byte) ([]byte, error) {
	token, err := os.ReadFile(filepath.Join(c.account, "token"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoPod, err)
	}
	at := c.base + "/api/v1/namespaces/" + url.PathEscape(s.Namespace) + "/secrets/" + url.PathEscape(s.Name)
	req, err := http.NewRequestWithContext(ctx, method, at, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Accept", "application/json")
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, refusal(resp.StatusCode, b)
	}
	return b, nil
}

// refusal returns the error in an answer. The API server says which verb and resource a service
// account lacks.
func refusal(code int, body []byte) error {
	var status struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(body, &status) != nil || status.Message == "" {
		status.Message = http.StatusText(code)
	}
	return fmt.Errorf("status %d: %s", code, status.Message)
}
