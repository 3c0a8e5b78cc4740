package main

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

// client talks to a running stagecoach over its HTTP API.
type client struct {
	base string // http://host:port
	user string
	pass string
	http *http.Client
}

func newClient(base string) *client {
	u, err := url.Parse(base)
	c := &client{base: strings.TrimSuffix(base, "/"), http: &http.Client{Timeout: 2 * time.Minute}}
	if err == nil && u.User != nil {
		c.user = u.User.Username()
		c.pass, _ = u.User.Password()
		u.User = nil
		c.base = strings.TrimSuffix(u.String(), "/")
	}
	return c
}

// deployment is a function as the API takes it.
type deployment struct {
	Service                string            `json:"service"`
	Image                  string            `json:"image"`
	Namespace              string            `json:"namespace,omitempty"`
	EnvProcess             string            `json:"envProcess,omitempty"`
	EnvVars                map[string]string `json:"envVars,omitempty"`
	Constraints            []string          `json:"constraints,omitempty"`
	Secrets                []string          `json:"secrets,omitempty"`
	Labels                 map[string]string `json:"labels,omitempty"`
	Annotations            map[string]string `json:"annotations,omitempty"`
	Limits                 *resources        `json:"limits,omitempty"`
	Requests               *resources        `json:"requests,omitempty"`
	ReadOnlyRootFilesystem bool              `json:"readOnlyRootFilesystem,omitempty"`
}

type resources struct {
	Memory string `json:"memory,omitempty"`
	CPU    string `json:"cpu,omitempty"`
}

// stackDeployment is what a function of a stack file asks for.
func stackDeployment(name string, f stack.Function) deployment {
	return deployment{
		Service: name, Image: f.Image, Namespace: f.Namespace, EnvProcess: f.FProcess, EnvVars: f.Environment, Constraints: f.Constraints,
		Secrets: f.Secrets, Labels: f.Labels, Annotations: f.Annotations, Limits: (*resources)(f.Limits), Requests: (*resources)(f.Requests),
		ReadOnlyRootFilesystem: f.ReadOnlyRootFilesystem,
	}
}

// functionStatus is a function as the API shows it.
type functionStatus struct {
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

// status returns the status of the deployed revision: a state, then details after a colon.
func (s *functionStatus) status() string { return s.Annotations[provider.StatusAnnotation] }

// lastFailure returns when and why a replica last failed, and its last lines; "" if none has
// failed.
func (s *functionStatus) lastFailure() string { return s.Annotations[provider.FailureAnnotation] }

// in reports whether the deployed revision is in a state.
func (s *functionStatus) in(state string) bool {
	is, _, _ := strings.Cut(s.status(), ":")
	return is == state
}

// answer is a response with its body read.
type answer struct {
	status int
	header http.Header
	body   []byte
	took   time.Duration
}

// url is the gateway's, with the credentials in it.
func (c *client) url() string {
	u, err := url.Parse(c.base)
	if err != nil || c.user == "" {
		return c.base
	}
	u.User = url.UserPassword(c.user, c.pass)
	return u.String()
}

// do sends a request and reads the answer, whatever its status.
func (c *client) do(ctx context.Context, method, path, contentType string, body []byte) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if c.user != "" {
		req.SetBasicAuth(c.user, c.pass)
	}
	start := time.Now()
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, unreachable(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, b, time.Since(start)}, nil
}

// unreachable says what to do about a gateway that is not there.
func unreachable(err error) error {
	if errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w; want a running `stagecoach up` there, or its URL in --gateway or $OPENFAAS_URL", err)
	}
	return err
}

// get decodes a 200's JSON into v.
func (c *client) get(ctx context.Context, path string, v any) error {
	a, err := c.do(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return err
	}
	return a.decode("GET "+path, v)
}

// decode decodes the JSON of an answer with status 200 into v.
func (a answer) decode(what string, v any) error {
	if a.status != http.StatusOK {
		return a.unexpected(what)
	}
	if err := json.Unmarshal(a.body, v); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func (a answer) unexpected(what string) error {
	return fmt.Errorf("%s: status %d: %s", what, a.status, console.Harmless(strings.TrimSpace(string(a.body))))
}

// deploy creates the function or replaces it.
func (c *client) deploy(ctx context.Context, d deployment) error {
	_, _, err := c.put(ctx, d)
	return err
}

// put deploys a function. It returns whether the function is new, and which process the server
// guessed.
func (c *client) put(ctx context.Context, d deployment) (created bool, guessed string, err error) {
	b, err := json.Marshal(d)
	if err != nil {
		return false, "", err
	}
	a, err := c.do(ctx, http.MethodPut, "/system/functions", "application/json", b)
	if err == nil && a.status == http.StatusNotFound {
		created = true
		a, err = c.do(ctx, http.MethodPost, "/system/functions", "application/json", b)
	}
	if err != nil {
		return false, "", err
	}
	if a.status >= 300 {
		return false, "", a.unexpected("deploy " + d.Service)
	}
	for line := range strings.Lines(string(a.body)) {
		if strings.HasPrefix(line, "guessed ") {
			guessed = strings.TrimSpace(line)
		}
	}
	return created, guessed, nil
}

// send sends v as JSON; any status but 2xx is an error with the server's message, which begins with what.
func (c *client) send(ctx context.Context, what, method, path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	a, err := c.do(ctx, method, path, "application/json", b)
	if err == nil && a.status >= 300 {
		err = a.unexpected(what)
	}
	return err
}

// status returns a function's state.
func (c *client) status(ctx context.Context, name string) (functionStatus, error) {
	var s functionStatus
	return s, c.get(ctx, "/system/function/"+url.PathEscape(name), &s)
}

// invoke posts body to a function or pipeline; any status but 200 is an error.
func (c *client) invoke(ctx context.Context, name, contentType string, body []byte) (answer, error) {
	a, err := c.do(ctx, http.MethodPost, "/function/"+name, contentType, body)
	if err == nil && a.status != http.StatusOK {
		err = a.unexpected("invoke " + name)
	}
	return a, err
}
