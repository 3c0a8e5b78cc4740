// Package kube reads and writes objects of Kubernetes from inside a pod: Secrets, ConfigMaps and
// Pods. It also follows changes of objects, and which machines take no new work. It talks to the
// API server with the pod's service account, and needs no library of Kubernetes.
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

// AccountFolder is where a pod has the credentials of its service account.
const AccountFolder = "/var/run/secrets/kubernetes.io/serviceaccount"

// maxAnswer bounds an answer of the API server, in bytes. A Secret has at most 1 MiB, and a page of
// a list is smaller than this, too.
const maxAnswer = 32 << 20

// answerTimeout bounds the time until an answer has come. Of a watch, it bounds that of its head.
const answerTimeout = 20 * time.Second

// ErrNoPod means that this process does not run in a pod with a service account.
var ErrNoPod = errors.New("kube: this process is not in a pod that has a service account's token")

// Client calls the API server. It is safe for concurrent use.
type Client struct {
	base    string // URL of the API server
	account string // folder with the file token, which the kubelet renews
	http    *http.Client
	pause   time.Duration // the first one of [Client.Follow] after an error
}

// Address returns the URL of the API server of the cluster that this pod belongs to; empty: this
// process's environment does not name one.
func Address() string {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return ""
	}
	return "https://" + net.JoinHostPort(host, port)
}

// InPod returns a client for the API server of the cluster that this pod belongs to.
func InPod() (*Client, error) {
	at := Address()
	if at == "" {
		return nil, fmt.Errorf("%w: KUBERNETES_SERVICE_HOST is not set", ErrNoPod)
	}
	return New(at, AccountFolder)
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
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true,
		ResponseHeaderTimeout: answerTimeout,
		// A watch ends soon if the API server is gone without a word.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second},
	}
	return &Client{base, account, &http.Client{Transport: transport}, pauseLeast}, nil
}

// Content types of bodies.
const (
	jsonBody   = "application/json"
	mergePatch = "application/merge-patch+json" // RFC 7386
)

// request is a request to the API server.
type request struct {
	method, path string
	query        url.Values
	kind         string // Content-Type of the body
	accept       string // empty: JSON
	body         []byte
}

// do sends a request, and returns the answer's body.
func (c *Client) do(ctx context.Context, r request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	resp, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return readAnswer(resp)
}

func readAnswer(resp *http.Response) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err == nil && len(b) > maxAnswer {
		err = fmt.Errorf("an answer of more than %d bytes", maxAnswer)
	}
	return b, err
}

// send sends a request. The caller closes the body of the answer, whose status is a success.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	token, err := os.ReadFile(filepath.Join(c.account, "token"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoPod, err)
	}
	at := c.base + r.path
	if len(r.query) > 0 {
		at += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, at, bytes.NewReader(r.body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Accept", "application/json")
	if r.accept != "" {
		req.Header.Set("Accept", r.accept)
	}
	if r.kind != "" {
		req.Header.Set("Content-Type", r.kind)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		defer resp.Body.Close()
		b, err := readAnswer(resp)
		if err != nil {
			return nil, err
		}
		return nil, refusal(resp.StatusCode, b)
	}
	return resp, nil
}

// Refused is an answer of the API server that is no success. Its message says which verb and
// resource a service account lacks, or why an object is not accepted.
type Refused struct {
	Status  int // of HTTP
	Message string
}

// Error implements error.
func (e *Refused) Error() string { return fmt.Sprintf("status %d: %s", e.Status, e.Message) }

// NotFound reports whether an error says that an object does not exist.
func NotFound(err error) bool { return refusedWith(err, http.StatusNotFound) }

// Conflict reports whether an error says that an object exists already, or is not the one that was
// meant.
func Conflict(err error) bool { return refusedWith(err, http.StatusConflict) }

// Invalid reports whether an error says that an object is not accepted as it is.
func Invalid(err error) bool { return refusedWith(err, http.StatusUnprocessableEntity) }

func refusedWith(err error, status int) bool {
	var refused *Refused
	return errors.As(err, &refused) && refused.Status == status
}

// refusal returns the error in an answer.
func refusal(code int, body []byte) error {
	var status struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(body, &status) != nil || status.Message == "" {
		status.Message = http.StatusText(code)
	}
	return &Refused{code, status.Message}
}
