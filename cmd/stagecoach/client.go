package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
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

// stackFile is the part of OpenFaaS's stack.yml that a deployment is made from.
type stackFile struct {
	Functions map[string]stackFunction `yaml:"functions"`
}

type stackFunction struct {
	Image       string            `yaml:"image"`
	FProcess    string            `yaml:"fprocess"`
	Environment map[string]string `yaml:"environment"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func readStack(file string) (stackFile, error) {
	var s stackFile
	b, err := os.ReadFile(file)
	if err != nil {
		return s, err
	}
	if err := yaml.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("%s: %w", file, err)
	}
	return s, nil
}

// deployment is a function as the API takes it.
type deployment struct {
	Service     string            `json:"service"`
	Image       string            `json:"image"`
	EnvProcess  string            `json:"envProcess,omitempty"`
	EnvVars     map[string]string `json:"envVars,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (f stackFunction) deployment(name string) deployment {
	return deployment{name, f.Image, f.FProcess, f.Environment, f.Labels, f.Annotations}
}

// functionStatus is a function as the API shows it.
type functionStatus struct {
	Name              string  `json:"name"`
	Replicas          int     `json:"replicas"`
	AvailableReplicas int     `json:"availableReplicas"`
	InvocationCount   float64 `json:"invocationCount"`
}

// answer is a response with its body read.
type answer struct {
	status int
	header http.Header
	body   []byte
	took   time.Duration
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
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, b, time.Since(start)}, nil
}

// get decodes a 200's JSON into v.
func (c *client) get(ctx context.Context, path string, v any) error {
	a, err := c.do(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return err
	}
	if a.status != http.StatusOK {
		return a.unexpected("GET " + path)
	}
	if err := json.Unmarshal(a.body, v); err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	return nil
}

func (a answer) unexpected(what string) error {
	return fmt.Errorf("%s: status %d: %s", what, a.status, strings.TrimSpace(string(a.body)))
}

// deploy creates the function or replaces it.
func (c *client) deploy(ctx context.Context, d deployment) error {
	b, err := json.Marshal(d)
	if err != nil {
		return err
	}
	a, err := c.do(ctx, http.MethodPut, "/system/functions", "application/json", b)
	if err == nil && a.status == http.StatusNotFound {
		a, err = c.do(ctx, http.MethodPost, "/system/functions", "application/json", b)
	}
	if err != nil {
		return err
	}
	if a.status >= 300 {
		return a.unexpected("deploy " + d.Service)
	}
	return nil
}

// status returns a function's state.
func (c *client) status(ctx context.Context, name string) (functionStatus, error) {
	var s functionStatus
	return s, c.get(ctx, "/system/function/"+name, &s)
}

// invoke posts body to a function or pipeline; any status but 200 is an error.
func (c *client) invoke(ctx context.Context, name, contentType string, body []byte) (answer, error) {
	a, err := c.do(ctx, http.MethodPost, "/function/"+name, contentType, body)
	if err == nil && a.status != http.StatusOK {
		err = a.unexpected("invoke " + name)
	}
	return a, err
}
