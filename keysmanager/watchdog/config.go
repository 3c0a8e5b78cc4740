package watchdog

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// The modes, with of-watchdog's names.
const (
	modeHTTP        = "http"
	modeStreaming   = "streaming"
	modeSerializing = "serializing"
	modeStatic      = "static"
)

// config is a replica's configuration, read from its environment.
type config struct {
	mode    string
	image   sandbox.Image
	network wire.Network // shared by this process and the program, unless a sandbox.Apart starts it
	// User of a program without its own root; nil: the user of this process.
	account     *sandbox.Account
	secrets     string            // folder with the secrets; empty: none
	relay       string            // socket of the node's daemon; empty: the gateway is on this machine
	process     []string          // the program and its arguments
	env         map[string]string // environment of the program
	upstream    *url.URL          // where the program listens; nil: on the port that it is given
	ready       string            // path of the readiness probe; empty: see the package comment
	health      string            // path of the health probe; empty: none
	static      string            // mode static: folder of the image with the files
	contentType string            // content type of what a process per request prints
	slots       int               // concurrent requests
	oom         oom

	delay, period time.Duration // before the first health probe, and between two
	// Bounds of a request: in total, for its body, and for its answer; 0: none.
	exec, read, write time.Duration
}

// healthPeriodDefault is the time between two health probes.
const healthPeriodDefault = 2 * time.Second

// Concurrent requests of a function without max_inflight.
const (
	slotsHTTP = 100
	slotsFork = 16
)

// parse reads an environment. Its error names all faults.
func parse(environ []string) (config, error) {
	given := map[string]string{}
	add := func(list []string) {
		for _, kv := range list {
			if k, v, ok := strings.Cut(kv, "="); ok {
				given[k] = v
			}
		}
	}
	add(environ)
	c := config{ready: given[wire.EnvReady]}
	if err := c.identify(given); err != nil {
		return c, err
	}
	healthDelay, rest, _ := strings.Cut(given[wire.EnvHealth], ",")
	var healthPeriod string
	healthPeriod, c.health, _ = strings.Cut(rest, ",")
	clear(given)
	add(c.image.Env) // the function's own environment wins
	add(program(environ))
	maps.DeleteFunc(given, func(k, _ string) bool { return strings.HasPrefix(k, "STAGECOACH_") })
	c.env = given

	var errs []error
	duration := func(name string) time.Duration {
		d, err := stage.Duration(name, given[name])
		errs = append(errs, err)
		return d
	}
	c.exec, c.read, c.write = duration("exec_timeout"), duration("read_timeout"), duration("write_timeout")
	var err [2]error
	c.delay, err[0] = stage.Duration("com.openfaas.health.http.initialDelay", healthDelay)
	c.period, err[1] = stage.Duration("com.openfaas.health.http.periodSeconds", healthPeriod)
	c.period = cmp.Or(c.period, healthPeriodDefault)
	errs = append(errs, err[:]...)
	if c.health != "" && c.health[0] != '/' {
		errs = append(errs, fmt.Errorf("health path %q, want one that starts with a slash", c.health))
	}
	c.ready = cmp.Or(c.ready, given["ready_path"])
	if c.ready != "" && c.ready[0] != '/' {
		errs = append(errs, fmt.Errorf("ready path %q, want one that starts with a slash", c.ready))
	}
	c.contentType = cmp.Or(given["content_type"], "application/octet-stream")
	c.process = strings.Fields(cmp.Or(given["fprocess"], given["function_process"]))
	c.mode = given["mode"]
	if c.mode == "" {
		c.mode = modeStreaming // of-watchdog's default
		if len(c.process) == 0 {
			c.mode = modeHTTP
		}
	}
	if len(c.process) == 0 {
		c.process = slices.Clone(c.image.Entrypoint)
	}
	if len(c.process) == 0 && c.mode != modeStatic {
		errs = append(errs, fmt.Errorf("image %q has no executable ./%s and no entrypoint, and the function no fprocess: want one of them", c.image.Name, sandbox.Executable))
	}
	c.slots = slotsFork
	switch c.mode {
	case modeHTTP:
		c.slots = slotsHTTP
		var err error
		c.upstream, err = upstream(cmp.Or(given["upstream_url"], given["http_upstream_url"]))
		errs = append(errs, err)
	case modeStatic:
		c.slots, c.static = slotsHTTP, cmp.Or(given["static_path"], staticPath)
	case modeStreaming, modeSerializing:
	default:
		errs = append(errs, fmt.Errorf("mode=%q, want %s, %s, %s or %s", c.mode, modeHTTP, modeStreaming, modeSerializing, modeStatic))
	}
	return c, errors.Join(errs...)
}

// program returns the variables of the program. All others belong to this process.
func program(environ []string) (own []string) {
	for _, kv := range environ {
		if kv, ok := strings.CutPrefix(kv, wire.EnvProgram); ok {
			own = append(own, kv)
		}
	}
	return own
}

// identify reads the image, the account, the folder of the secrets, and the daemon's socket.
func (c *config) identify(given map[string]string) error {
	if err := json.Unmarshal([]byte(given[wire.EnvImage]), &c.image); err != nil {
		return fmt.Errorf("environment %s: %w; a function is started by `stagecoach up`", wire.EnvImage, err)
	}
	c.secrets, c.relay = given[wire.EnvSecrets], given[wire.EnvRendezvous]
	c.oom.file, c.oom.text, _ = strings.Cut(given[wire.EnvOutOfMemory], " ")
	for name, to := range map[string]any{wire.EnvAccount: &c.account, wire.EnvNetwork: &c.network} {
		if given[name] == "" {
			continue
		}
		if err := json.Unmarshal([]byte(given[name]), to); err != nil {
			return fmt.Errorf("environment %s: %w", name, err)
		}
	}
	return nil
}

// upstream parses upstream_url; nil: the variable is not set.
func upstream(value string) (*url.URL, error) {
	if value == "" {
		return nil, nil
	}
	u, err := url.Parse(value)
	if err != nil || u.Scheme != "http" || u.Port() == "" || u.RawQuery != "" {
		return nil, fmt.Errorf("upstream_url=%q, want http://127.0.0.1:PORT", value)
	}
	switch u.Hostname() {
	case "127.0.0.1", "localhost", "::1":
		return u, nil
	}
	return nil, fmt.Errorf("upstream_url=%q: host %q, want 127.0.0.1: a function answers by itself", value, u.Hostname())
}
