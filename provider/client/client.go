// Package client calls the API of a running stagecoach.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// Client calls the HTTP API of a running stagecoach.
type Client struct {
	Base string // http://host:port
	User string
	Pass string
	HTTP *http.Client
}

// New returns a client for a URL. Credentials in the URL are sent with each request.
func New(base string) *Client {
	u, err := url.Parse(base)
	c := &Client{Base: strings.TrimSuffix(base, "/"), HTTP: &http.Client{Timeout: 2 * time.Minute}}
	if err == nil && u.User != nil {
		c.User = u.User.Username()
		c.Pass, _ = u.User.Password()
		u.User = nil
		c.Base = strings.TrimSuffix(u.String(), "/")
	}
	return c
}

// Deployment is a function as the API takes it.
type Deployment struct {
	Service                string            `json:"service"`
	Image                  string            `json:"image"`
	Namespace              string            `json:"namespace,omitempty"`
	EnvProcess             string            `json:"envProcess,omitempty"`
	EnvVars                map[string]string `json:"envVars,omitempty"`
	Constraints            []string          `json:"constraints,omitempty"`
	Secrets                []string          `json:"secrets,omitempty"`
	Labels                 map[string]string `json:"labels,omitempty"`
	Annotations            map[string]string `json:"annotations,omitempty"`
	Limits                 *Resources        `json:"limits,omitempty"`
	Requests               *Resources        `json:"requests,omitempty"`
	ReadOnlyRootFilesystem bool              `json:"readOnlyRootFilesystem,omitempty"`
}

// Resources are limits or requests, as Kubernetes writes them.
type Resources struct {
	Memory string `json:"memory,omitempty"`
	CPU    string `json:"cpu,omitempty"`
}

// FromStack returns the deployment of a function of a stack file.
func FromStack(name string, f stack.Function) Deployment {
	return Deployment{
		Service: name, Image: f.Image, Namespace: f.Namespace, EnvProcess: f.FProcess, EnvVars: f.Environment, Constraints: f.Constraints,
		Secrets: f.Secrets, Labels: f.Labels, Annotations: f.Annotations, Limits: (*Resources)(f.Limits), Requests: (*Resources)(f.Requests),
		ReadOnlyRootFilesystem: f.ReadOnlyRootFilesystem,
	}
}

// FunctionStatus is a function as the API shows it.
type FunctionStatus struct {
	Name              string  `json:"name"`
	Image             string  `json:"image,omitempty"`
	Namespace         string  `json:"namespace,omitempty"`
	Replicas          int     `json:"replicas"`
	AvailableReplicas int     `json:"availableReplicas"`
	InvocationCount   float64 `json:"invocationCount"`

	Annotations map[string]string `json:"annotations,omitempty"`

	Usage *struct {
		CPU              float64 `json:"cpu"` // thousandths of a core
		TotalMemoryBytes float64 `json:"totalMemoryBytes"`
	} `json:"usage,omitempty"`
}

// Status returns the status of the deployed revision: a state, then details after a colon.
func (s *FunctionStatus) Status() string { return s.Annotations[provider.StatusAnnotation] }

// LastFailure returns when and why a replica last failed, and its last lines; "" if none has
// failed.
func (s *FunctionStatus) LastFailure() string { return s.Annotations[provider.FailureAnnotation] }

// In reports whether the deployed revision is in a state.
func (s *FunctionStatus) In(state string) bool {
	is, _, _ := strings.Cut(s.Status(), ":")
	return is == state
}

// Answer is a response with its body read.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
	Took   time.Duration
}

// URL is the gateway's, with the credentials in it.
func (c *Client) URL() string {
	u, err := url.Parse(c.Base)
	if err != nil || c.User == "" {
		return c.Base
	}
	u.User = url.UserPassword(c.User, c.Pass)
	return u.String()
}

// Do sends a request and reads the answer, whatever its status.
func (c *Client) Do(ctx context.Context, method, path, contentType string, body []byte) (Answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, bytes.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if c.User != "" {
		req.SetBasicAuth(c.User, c.Pass)
	}
	start := time.Now()
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return Answer{}, unreachable(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return Answer{resp.StatusCode, resp.Header, b, time.Since(start)}, nil
}

// unreachable adds to an error of a connection what to do about a gateway that is not there.
func unreachable(err error) error {
	if errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w; want a running `stagecoach up` there, or its URL in --gateway or $OPENFAAS_URL", err)
	}
	return err
}

// Get decodes a 200's JSON into v.
func (c *Client) Get(ctx context.Context, path string, v any) error {
	a, err := c.Do(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return err
	}
	return a.Decode("GET "+path, v)
}

// Decode decodes the JSON of an answer with status 200 into v.
func (a Answer) Decode(what string, v any) error {
	if a.Status != http.StatusOK {
		return a.Unexpected(what)
	}
	if err := json.Unmarshal(a.Body, v); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Unexpected returns an error for an answer with another status than the wanted one. It has the
// server's message.
func (a Answer) Unexpected(what string) error {
	return fmt.Errorf("%s: status %d: %s", what, a.Status, console.Harmless(strings.TrimSpace(string(a.Body))))
}

// Deploy creates the function or replaces it.
func (c *Client) Deploy(ctx context.Context, d Deployment) error {
	_, _, err := c.Put(ctx, d)
	return err
}

// Put deploys a function. It returns whether the function is new, and which process the server
// guessed.
func (c *Client) Put(ctx context.Context, d Deployment) (created bool, guessed string, err error) {
	b, err := json.Marshal(d)
	if err != nil {
		return false, "", err
	}
	a, err := c.Do(ctx, http.MethodPut, "/system/functions", "application/json", b)
	if err == nil && a.Status == http.StatusNotFound {
		created = true
		a, err = c.Do(ctx, http.MethodPost, "/system/functions", "application/json", b)
	}
	if err != nil {
		return false, "", err
	}
	if a.Status >= 300 {
		return false, "", a.Unexpected("deploy " + d.Service)
	}
	for line := range strings.Lines(string(a.Body)) {
		if strings.HasPrefix(line, "guessed ") {
			guessed = strings.TrimSpace(line)
		}
	}
	return created, guessed, nil
}

// Send sends v as JSON. Any status but 2xx is an error, which begins with what and has the server's
// message.
func (c *Client) Send(ctx context.Context, what, method, path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	a, err := c.Do(ctx, method, path, "application/json", b)
	if err == nil && a.Status >= 300 {
		err = a.Unexpected(what)
	}
	return err
}

// Status returns a function's state.
func (c *Client) Status(ctx context.Context, name string) (FunctionStatus, error) {
	var s FunctionStatus
	return s, c.Get(ctx, "/system/function/"+url.PathEscape(name), &s)
}

// Invoke posts body to a function or pipeline; any status but 200 is an error.
func (c *Client) Invoke(ctx context.Context, name, contentType string, body []byte) (Answer, error) {
	a, err := c.Do(ctx, http.MethodPost, "/function/"+name, contentType, body)
	if err == nil && a.Status != http.StatusOK {
		err = a.Unexpected("invoke " + name)
	}
	return a, err
}
