package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/cmd/stagecoach/cli"
	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/keysmanager/device"
	"github.com/stagecoach-serving/stagecoach/keysmanager/network/cni"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Config configures `stagecoach up`: defaults, then the file, then flags.
type Config struct {
	Listen string `yaml:"listen"` // host:port of the API and the data path
	// Folder that survives restarts. It holds specs, the journal and parameter files.
	State string `yaml:"state"`
	// Folder with the images of the process runtime; default STATE/images.
	Images string `yaml:"images"`
	// Bytes per second that this process sends of its images to nodes; 0: not limited.
	ImageRate Bytes `yaml:"imageRate"`
	// ONNX Runtime's shared library; empty: functions with a model cannot start.
	ORT          string `yaml:"ort"`
	BasicAuthDir string `yaml:"basicAuthDir"` // holds basic-auth-user and basic-auth-password

	Node     NodeConfig     `yaml:"node"`
	Requests RequestsConfig `yaml:"requests"`
	Control  ControlConfig  `yaml:"control"`
	Registry RegistryConfig `yaml:"registry"`
	Journal  JournalConfig  `yaml:"journal"`
	NATS     NATSConfig     `yaml:"nats"`
	Cluster  ClusterConfig  `yaml:"cluster"`

	// What a control plane in a pod keeps in Kubernetes.
	Kubernetes KubernetesConfig `yaml:"kubernetes"`

	Runtime   RuntimeConfig   `yaml:"runtime"`
	Isolation IsolationConfig `yaml:"isolation"`
	Telemetry TelemetryConfig `yaml:"telemetry"`
	Log       LogConfig       `yaml:"log"`
}

// TelemetryConfig configures where spans are sent.
type TelemetryConfig struct {
	// URL of a collector; empty: OTEL_EXPORTER_OTLP_ENDPOINT decides, and by default spans are not
	// sent.
	OTLP string `yaml:"otlp"`
}

// LogConfig configures the log on standard error.
type LogConfig struct {
	Level  slog.Level `yaml:"level"`
	Format string     `yaml:"format"` // text, json
}

// logger returns a logger that writes to w as configured.
func (c LogConfig) logger(w io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{Level: c.Level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// NodeConfig configures the node that this process is.
type NodeConfig struct {
	Name   string `yaml:"name"`   // default: the host name
	Memory Bytes  `yaml:"memory"` // for zygotes and replicas; default: the machine's or the cgroup's
	// Accelerators of the node: all, none, or UUIDs and indices separated by commas.
	Devices string `yaml:"devices"`
	None    bool   `yaml:"none"` // this process is no node: replicas run on nodes that join
}

// RequestsConfig bounds the requests of clients.
type RequestsConfig struct {
	Timeout    time.Duration `yaml:"timeout"`    // of a request without a timeout of its own
	MaxTimeout time.Duration `yaml:"maxTimeout"` // the most that X-Timeout may ask for
	MaxBody    Bytes         `yaml:"maxBody"`
	BodyMemory Bytes         `yaml:"bodyMemory"` // of all bodies together; further requests get 503
	InFlight   int           `yaml:"inFlight"`   // requests at the same time; further requests get 429
	// Time for which a client may send nothing of its body, or read nothing of its answer.
	Stall time.Duration `yaml:"stall"`

	// CIDRs of proxies whose X-Forwarded-For names the client.
	TrustedProxies []string `yaml:"trustedProxies"`
}

// RegistryConfig configures how images are fetched.
type RegistryConfig struct {
	// File with credentials; empty: ~/.docker/config.json, or DOCKER_CONFIG/config.json.
	Auth     string   `yaml:"auth"`
	Insecure []string `yaml:"insecure"` // hosts[:port] without TLS; loopback addresses never need TLS
	// Host for images that name none; empty: such images are in no registry.
	Default string        `yaml:"default"`
	Timeout time.Duration `yaml:"timeout"` // of a deploy whose image is fetched
}

// ControlConfig configures the control loop and its limits.
type ControlConfig struct {
	// Replicas that all functions together may have; 0: as many as the nodes hold.
	Budget       int           `yaml:"budget"`
	Tick         time.Duration `yaml:"tick"`
	StartTimeout time.Duration `yaml:"startTimeout"` // in work at the same time, over all functions
	// Time for a replica to drain, longer if its requests have later deadlines. It is also the time
	// for the whole process on SIGTERM.
	DrainTimeout time.Duration `yaml:"drainTimeout"`
	Policies     policy.Names  `yaml:"policies"` // that decide; empty: the default of each level
	Record       string        `yaml:"record"`   // file to which each decision is written; empty: none
}

// JournalConfig bounds async requests.
type JournalConfig struct {
	Bytes Bytes `yaml:"bytes"` // kept on disk; above it async requests get 503
	// How often records are synced to the disk; 0: each one before its 202.
	Sync   time.Duration `yaml:"sync"`
	Window int           `yaml:"window"` // requests in work at the same time, over all functions
}

// Bytes is a size in a file or flag: a number of bytes, or a number with the suffix Ki, Mi or Gi.
type Bytes int64

// UnmarshalText accepts forms such as 123, 64Ki, 64Mi and 2Gi.
func (b *Bytes) UnmarshalText(text []byte) error {
	s, shift := string(text), 0
	for i, suffix := range []string{"Ki", "Mi", "Gi"} {
		if rest, ok := strings.CutSuffix(s, suffix); ok {
			s, shift = rest, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseUint(s, 10, 62)
	if err != nil || n > (1<<62)>>shift {
		return fmt.Errorf("%q, want a number of bytes such as 1048576, 64Ki, 512Mi or 4Gi", text)
	}
	*b = Bytes(n << shift)
	return nil
}

// UnmarshalYAML passes numbers and strings to UnmarshalText.
func (b *Bytes) UnmarshalYAML(n *yaml.Node) error { return b.UnmarshalText([]byte(n.Value)) }

func defaultConfig() Config {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "localhost"
	}
	return Config{
		Listen:  "127.0.0.1:8080",
		State:   cli.DefaultState,
		Node:    NodeConfig{Name: host, Devices: "all"},
		NATS:    NATSConfig{Certificates: 24 * time.Hour},
		Cluster: ClusterConfig{Listen: ":0"},
		Requests: RequestsConfig{
			Timeout: time.Minute, MaxTimeout: time.Hour, MaxBody: 32 << 20, BodyMemory: 512 << 20, InFlight: 10_000, Stall: 30 * time.Second,
		},
		Registry:  RegistryConfig{Timeout: image.DefaultTimeout},
		Control:   ControlConfig{Tick: time.Second, StartTimeout: time.Minute, DrainTimeout: 30 * time.Second},
		Journal:   JournalConfig{Bytes: 1 << 30, Sync: 2 * time.Minute, Window: 1024},
		Log:       LogConfig{Format: "text"},
		Runtime:   defaultRuntime(),
		Isolation: IsolationConfig{UIDs: sandbox.DefaultRange.String(), Network: defaultNetwork, CNIBinDir: cni.DefaultBinDir},
	}
}

// readConfig reads file into c. Fields that the file lacks keep their values. Unknown fields are
// errors.
func (c *Config) readConfig(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(c); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("config %s: %w", file, err)
	}
	return nil
}

// Validate reports every invalid field by its path in the file.
func (c *Config) Validate() error {
	var errs []error
	bad := func(path string, got any, want string) {
		errs = append(errs, fmt.Errorf("%s: %v, want %s", path, got, want))
	}
	atLeast := func(path string, got, least time.Duration) {
		if got < least {
			bad(path, got, fmt.Sprintf("at least %v", least))
		}
	}
	count := func(path string, got, least, most int) {
		if got < least || got > most {
			bad(path, got, fmt.Sprintf("%d to %d", least, most))
		}
	}
	c.validateAddresses(bad)
	if c.State == "" {
		bad("state", `""`, "a folder")
	}
	c.Node.validate(bad)
	validImageRate("imageRate", c.ImageRate, bad)
	if c.ORT != "" {
		if _, err := os.Stat(c.ORT); err != nil {
			bad("ort", err, "the path of libonnxruntime.so")
		}
	}
	if c.Node.None && !c.NATS.joining() {
		bad("node.none", true, "nats.listen or nats.urls too: else there is no node that could run replicas")
	}
	atLeast("nats.certificates", c.NATS.Certificates, 5*time.Second)
	atLeast("requests.timeout", c.Requests.Timeout, time.Millisecond)
	atLeast("requests.maxTimeout", c.Requests.MaxTimeout, c.Requests.Timeout)
	if c.Requests.MaxBody < 1<<10 || c.Requests.MaxBody > 1<<30 {
		bad("requests.maxBody", int64(c.Requests.MaxBody), "1Ki to 1Gi")
	}
	if c.Requests.BodyMemory < 1<<20 {
		bad("requests.bodyMemory", int64(c.Requests.BodyMemory), "at least 1Mi")
	}
	atLeast("requests.stall", c.Requests.Stall, 10*time.Millisecond)
	count("requests.inFlight", c.Requests.InFlight, 1, 1_000_000)
	if _, err := peer.ParseProxies(c.Requests.TrustedProxies); err != nil {
		errs = append(errs, fmt.Errorf("requests.trustedProxies: %w", err))
	}
	atLeast("registry.timeout", c.Registry.Timeout, time.Second)
	c.Registry.validate(bad)
	atLeast("control.tick", c.Control.Tick, 100*time.Millisecond)
	atLeast("control.startTimeout", c.Control.StartTimeout, time.Second)
	atLeast("control.drainTimeout", c.Control.DrainTimeout, 0)
	count("control.budget", c.Control.Budget, 0, 1_000_000)
	c.Control.validate(bad)
	if c.Journal.Bytes < 16<<20 {
		bad("journal.bytes", int64(c.Journal.Bytes), "at least 16Mi")
	}
	atLeast("journal.sync", c.Journal.Sync, 0)
	count("journal.window", c.Journal.Window, 1, 10_000)
	if u, err := url.Parse(c.Telemetry.OTLP); c.Telemetry.OTLP != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
		bad("telemetry.otlp", fmt.Sprintf("%q", c.Telemetry.OTLP), "the URL of a collector, such as http://127.0.0.1:4318")
	}
	if err := new(sandbox.Range).UnmarshalText([]byte(c.Isolation.UIDs)); err != nil {
		bad("isolation.uids", fmt.Sprintf("%q", c.Isolation.UIDs), "FIRST-LAST, such as "+sandbox.DefaultRange.String()+", 1024 numbers at least and none below 1000")
	}
	if err := validNetwork(c.Isolation.Network); err != nil {
		bad("isolation.network", fmt.Sprintf("%q", c.Isolation.Network), err.Error())
	}
	c.Runtime.validate(func(field string, got any, want string) { bad("runtime."+field, got, want) })
	if c.Log.Format != "text" && c.Log.Format != "json" {
		bad("log.format", fmt.Sprintf("%q", c.Log.Format), "text or json")
	}
	return errors.Join(errs...)
}

// validateAddresses reports addresses that cannot be listened on, or that other machines could
// reach.
func (c *Config) validateAddresses(bad func(path string, got any, want string)) {
	if host, port, err := net.SplitHostPort(c.Listen); err != nil || port == "" {
		bad("listen", fmt.Sprintf("%q", c.Listen), "host:port, such as 127.0.0.1:8080")
	} else if c.BasicAuthDir == "" && !loopback(host) {
		bad("listen", fmt.Sprintf("%q without basicAuthDir", c.Listen),
			"a loopback address, or a folder with basic-auth-user and basic-auth-password: everyone who reaches the address could deploy")
	}
	c.NATS.validate(bad)
	c.Cluster.validate(&c.NATS, bad)
	c.Kubernetes.validate(bad)
}

// validate reports the invalid fields of node.
func (n *NodeConfig) validate(bad func(path string, got any, want string)) {
	if n.Name == "" || strings.ContainsAny(n.Name, " \t\n/") {
		bad("node.name", fmt.Sprintf("%q", n.Name), "a name without spaces and slashes")
	}
	if n.Memory != 0 && n.Memory < 64<<20 {
		bad("node.memory", int64(n.Memory), "at least 64Mi, or 0 for what the machine has")
	}
	if _, err := device.ParseShare(n.Devices); err != nil {
		bad("node.devices", fmt.Sprintf("%q", n.Devices), "all, none, or UUIDs and indices with commas between, such as 0,2 or GPU-5f…")
	}
}

// validate reports unknown policies, a bad price, a budget that no policy keeps, and a record whose
// folder does not exist.
func (c *ControlConfig) validate(bad func(path string, got any, want string)) {
	p := c.Policies
	for _, level := range []struct {
		path, name string
		alone      policy.Names
	}{
		{"allocator", p.Allocator, policy.Names{Allocator: p.Allocator}},
		{"corrector", p.Corrector, policy.Names{Corrector: p.Corrector}},
		{"sharer", p.Sharer, policy.Names{Sharer: p.Sharer}},
		{"placer", p.Placer, policy.Names{Placer: p.Placer}},
		{"warmer", p.Warmer, policy.Names{Warmer: p.Warmer}},
		{"rank", p.Rank, policy.Names{Rank: p.Rank}},
		{"route", p.Route, policy.Names{Route: p.Route}},
	} {
		var wrong *policy.NameError
		if _, err := level.alone.Choose(); errors.As(err, &wrong) {
			bad("control.policies."+level.path, fmt.Sprintf("%q", level.name), wrong.Want)
		}
	}
	var price *policy.PriceError
	set, err := p.Choose()
	switch {
	case errors.As(err, &price):
		bad("control.policies.price", p.Price, price.Want())
	case err == nil && p.Price > 0 && set.Names().Allocator != "sizer":
		bad("control.policies.price", p.Price, "0, or the allocator sizer: no other one adds replicas for latency")
	}
	if c.Budget > 0 && err == nil && set.Names().Allocator == "sizer" && set.Names().Sharer == "none" {
		bad("control.budget", c.Budget, "0, or another control.policies.sharer than none: the sharer keeps to it")
	}
	if dir, err := os.Stat(filepath.Dir(c.Record)); c.Record != "" && (err != nil || !dir.IsDir()) {
		bad("control.record", fmt.Sprintf("%q", c.Record), "a file in a folder that is there")
	}
}

func (c *RegistryConfig) validate(bad func(path string, got any, want string)) {
	isHost := func(path, host string) {
		if ref, err := image.ParseRef(host + "/x"); err != nil || ref.Host != host || host == "" {
			bad(path, fmt.Sprintf("%q", host), "a host with a dot or a port, such as registry.example or 10.0.0.7:5000")
		}
	}
	if c.Default != "" {
		isHost("registry.default", c.Default)
	}
	for _, host := range c.Insecure {
		isHost("registry.insecure", host)
	}
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (c *Config) imagesDir() string {
	if c.Images != "" {
		return c.Images
	}
	return filepath.Join(c.State, "images")
}
