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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	account string // folder with the files token and ca.crt, which the kubelet renews
	http    atomic.Pointer[http.Client]
	pause   time.Duration // the first one of [Client.Follow] after an error

	mu sync.Mutex // held to read ca.crt
	ca []byte     // ca.crt as http has it
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
	c := &Client{base: base, account: account, pause: pauseLeast}
	if err := c.trust(); err != nil {
		return nil, err
	}
	return c, nil
}

// trust reads the certificate of the API server's authority. If the file has changed since it was
// last read, new requests use the new certificate.
func (c *Client) trust() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ca, err := os.ReadFile(filepath.Join(c.account, "ca.crt"))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoPod, err)
	}
	if bytes.Equal(ca, c.ca) && c.http.Load() != nil {
		return nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return fmt.Errorf("kube: %s/ca.crt has no certificate", c.account)
	}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true,
		ResponseHeaderTimeout: answerTimeout,
		// A watch ends soon if the API server is gone without a word.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second},
	}
	c.ca = ca
	if before := c.http.Swap(&http.Client{Transport: transport}); before != nil {
		before.CloseIdleConnections()
	}
	return nil
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

// send sends a request. The caller closes the body of the answer, whose status is a success. If the
// API server has another authority by now, or is busy, the request is sent once more.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	used := c.http.Load()
	resp, err := r.try(ctx, c, used)
	if unknown := (*tls.CertificateVerificationError)(nil); errors.As(err, &unknown) {
		// Another request may have read the file meanwhile.
		if c.trust() == nil && c.http.Load() != used {
			resp, err = r.try(ctx, c, c.http.Load())
		}
	}
	if busy := (*Refused)(nil); errors.As(err, &busy) && busy.again(ctx) {
		resp, err = r.try(ctx, c, c.http.Load())
	}
	return resp, err
}

// try sends a request of c once.
func (r request) try(ctx context.Context, c *Client, through *http.Client) (*http.Response, error) {
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
	resp, err := through.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		defer resp.Body.Close()
		b, err := readAnswer(resp)
		if err != nil {
			return nil, err
		}
		refused := refusal(resp.StatusCode, b)
		refused.later = resp.Header.Get("Retry-After")
		return nil, refused
	}
	return resp, nil
}

// Refused is an answer of the API server that is no success. Its message says which verb and
// resource a service account lacks, or why an object is not accepted.
type Refused struct {
	Status  int // of HTTP
	Message string
	later   string // seconds after which the API server takes the request; empty: it does not say
}

// again waits until the API server takes a request that it has refused because it is busy. It
// reports false if the server does not say when that is, or if it is too late for ctx.
func (e *Refused) again(ctx context.Context) bool {
	seconds, err := strconv.ParseUint(e.later, 10, 16)
	if e.Status != http.StatusTooManyRequests || err != nil {
		return false
	}
	pause := time.Duration(seconds) * time.Second
	if end, bounded := ctx.Deadline(); pause > answerTimeout || bounded && time.Until(end) < pause {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
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
func refusal(code int, body []byte) *Refused {
	var status struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(body, &status) != nil || status.Message == "" {
		status.Message = http.StatusText(code)
	}
	return &Refused{Status: code, Message: status.Message}
}
