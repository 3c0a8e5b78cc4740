package main

import (
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

func TestValidateNamesEachField(t *testing.T) {
	if c := defaultConfig(); c.Validate() != nil {
		t.Fatalf("the defaults: %v", c.Validate())
	}
	for name, tc := range map[string]struct {
		change func(*Config)
		want   []string // in the error, one line each
	}{
		"listen without port":   {func(c *Config) { c.Listen = "127.0.0.1" }, []string{`listen: "127.0.0.1", want host:port`}},
		"listen with no port":   {func(c *Config) { c.Listen = "127.0.0.1:" }, []string{`listen: "127.0.0.1:", want host:port`}},
		"listen to all":         {func(c *Config) { c.Listen = ":8080" }, []string{"listen: \":8080\" without basicAuthDir"}},
		"listen to an address":  {func(c *Config) { c.Listen = "192.0.2.1:8080" }, []string{"listen: ", "without basicAuthDir"}},
		"nats twice":            {func(c *Config) { c.NATS.Listen, c.NATS.URLs = "127.0.0.1:4222", []string{"nats://a:4222"} }, []string{`nats.listen: "127.0.0.1:4222", want no address with nats.urls`}},
		"nats URL":              {func(c *Config) { c.NATS.URLs = []string{"nats://b:4222", "a:4222"} }, []string{`nats.urls: "a:4222", want URLs such as`}},
		"nats URL, of HTTP":     {func(c *Config) { c.NATS.URLs = []string{"http://a"} }, []string{`nats.urls: "http://a"`}},
		"imageRate":             {func(c *Config) { c.ImageRate = 1 }, []string{"imageRate: 1, want at least"}},
		"nats files":            {func(c *Config) { c.NATS.Creds, c.NATS.Cert = "/none", "/none" }, []string{`nats.creds: "/none", want nats.urls too`, "nats.creds: stat /none", "want nats.cert and nats.key, or neither"}},
		"nats replicas":         {func(c *Config) { c.NATS.URLs, c.NATS.Replicas = []string{"nats://a:4222"}, 2 }, []string{"nats.replicas: 2, want 1, 3 or 5"}},
		"nats replicas inside":  {func(c *Config) { c.NATS.Replicas = 3 }, []string{"nats.replicas: 3, want 0"}},
		"listen to a name":      {func(c *Config) { c.Listen = "example.org:80" }, []string{"listen: ", "without basicAuthDir"}},
		"state":                 {func(c *Config) { c.State = "" }, []string{`state: "", want a folder`}},
		"node.name empty":       {func(c *Config) { c.Node.Name = "" }, []string{"node.name: "}},
		"node.name":             {func(c *Config) { c.Node.Name = "a b" }, []string{`node.name: "a b"`}},
		"node.memory":           {func(c *Config) { c.Node.Memory = 1 << 20 }, []string{"node.memory: 1048576, want at least 64Mi"}},
		"runtime.snapshotter":   {func(c *Config) { c.Runtime.Snapshotter = "" }, []string{`runtime.snapshotter: ""`, "overlayfs"}},
		"runtime.hostsDir":      {func(c *Config) { c.Runtime.HostsDir = "" }, []string{`runtime.hostsDir: ""`, "certs.d"}},
		"ort":                   {func(c *Config) { c.ORT = "/none" }, []string{"ort: ", "libonnxruntime.so"}},
		"requests.timeout":      {func(c *Config) { c.Requests.Timeout = 0 }, []string{"requests.timeout: 0s, want at least 1ms"}},
		"requests.maxTimeout":   {func(c *Config) { c.Requests.MaxTimeout = time.Second }, []string{"requests.maxTimeout: 1s, want at least 1m0s"}},
		"requests.bodyMemory":   {func(c *Config) { c.Requests.BodyMemory = 5 }, []string{"requests.bodyMemory: 5, want at least 1Mi"}},
		"requests.maxBody":      {func(c *Config) { c.Requests.MaxBody = 1 << 31 }, []string{"requests.maxBody: 2147483648, want 1Ki to 1Gi"}},
		"requests.inFlight":     {func(c *Config) { c.Requests.InFlight = 0 }, []string{"requests.inFlight: 0, want 1 to 1000000"}},
		"trustedProxies":        {func(c *Config) { c.Requests.TrustedProxies = []string{"10.0.0.0/8", "lb"} }, []string{`requests.trustedProxies: "lb", want an address or a CIDR`}},
		"control.tick":          {func(c *Config) { c.Control.Tick = time.Millisecond }, []string{"control.tick: 1ms, want at least 100ms"}},
		"control.startTimeout":  {func(c *Config) { c.Control.StartTimeout = 0 }, []string{"control.startTimeout: "}},
		"control.budget":        {func(c *Config) { c.Control.Budget = -1 }, []string{"control.budget: -1, want 0 to 1000000"}},
		"a budget nobody keeps": {func(c *Config) { c.Control.Budget, c.Control.Policies.Sharer = 5, "none" }, []string{"control.budget: 5, want 0, or another control.policies.sharer"}},
		"control.policies":      {func(c *Config) { c.Control.Policies.Sharer = "greedy" }, []string{`control.policies.sharer: "greedy", want one of `}},
		"a negative price":      {func(c *Config) { c.Control.Policies.Price = -1 }, []string{"control.policies.price: -1, want 0 to 1000000"}},
		"a price of no number":  {func(c *Config) { c.Control.Policies.Price = math.NaN() }, []string{"control.policies.price: NaN, want 0 to 1000000"}},
		"an infinite price":     {func(c *Config) { c.Control.Policies.Price = math.Inf(1) }, []string{"control.policies.price: +Inf, want 0 to 1000000"}},
		"a price for nobody":    {func(c *Config) { c.Control.Policies.Price, c.Control.Policies.Allocator = 1, "uniform" }, []string{"control.policies.price: 1, want 0, or the allocator sizer"}},
		"control.record":        {func(c *Config) { c.Control.Record = "/none/x" }, []string{`control.record: "/none/x", want a file in a folder that is there`}},
		"control.drainTimeout":  {func(c *Config) { c.Control.DrainTimeout = -1 }, []string{"control.drainTimeout: "}},
		"journal.bytes":         {func(c *Config) { c.Journal.Bytes = 0 }, []string{"journal.bytes: 0, want at least 16Mi"}},
		"journal.sync":          {func(c *Config) { c.Journal.Sync = -1 }, []string{"journal.sync: "}},
		"journal.window":        {func(c *Config) { c.Journal.Window = 0 }, []string{"journal.window: "}},
		"runtime.classes":       {func(c *Config) { c.Runtime.Classes = "gvisor=runsc" }, []string{`runtime.classes: "gvisor=runsc", want NAME=RUNTIME with commas between`}},
		"runtime.classes twice": {func(c *Config) { c.Runtime.Classes = "a=io.x.v1,a=io.y.v1" }, []string{"want each name once; a is there twice"}},
		"runtime.cdiDevices":    {func(c *Config) { c.Runtime.CDIDevices = "/dev/null" }, []string{`runtime.cdiDevices: "/dev/null", want CDI's names`}},
		"cluster.listen":        {func(c *Config) { c.Cluster.Listen = "7444" }, []string{`cluster.listen: "7444", want host:port`}},
		"cluster.advertise":     {func(c *Config) { c.Cluster.Advertise = "a" }, []string{`cluster.advertise: "a", want host:port`}},
		"cluster.joinSecret":    {func(c *Config) { c.Cluster.JoinSecret = "join" }, []string{`cluster.joinSecret: "join", want NAMESPACE/NAME`}},
		"join without a key":    {func(c *Config) { c.Cluster.JoinSecret = "a/b" }, []string{`cluster.joinSecret: "a/b", want cluster.key too`}},
		"cordons without a key": {func(c *Config) { c.Cluster.FollowCordons = true }, []string{"cluster.followCordons: true, want cluster.key too"}},
		"lead without a key":    {func(c *Config) { c.Cluster.LeadWithoutSecrets = true }, []string{"cluster.leadWithoutSecrets: true, want cluster.key too"}},
		"kube namespaces":       {func(c *Config) { c.Kubernetes.Namespaces = []string{"openfaas-fn", "Team"} }, []string{`kubernetes.namespaces: "Team", want names`}},
		"kube, no default":      {func(c *Config) { c.Kubernetes.Namespaces = []string{"team"} }, []string{"kubernetes.namespaces: [team], want openfaas-fn too"}},
		"kube, no namespaces":   {func(c *Config) { c.Kubernetes.Secrets = true }, []string{"kubernetes.secrets: true, want kubernetes.namespaces too"}},
		"isolation.uids":        {func(c *Config) { c.Isolation.UIDs = "0-9" }, []string{`isolation.uids: "0-9", want FIRST-LAST`}},
		"isolation.network":     {func(c *Config) { c.Isolation.Network = "10.0.0.0/30" }, []string{`isolation.network: "10.0.0.0/30", want a prefix of 8 to 20 bits of IPv4`}},
		"three at once": {
			func(c *Config) { c.State, c.Control.Tick, c.Journal.Window = "", 0, -1 },
			[]string{"state: ", "\ncontrol.tick: ", "\njournal.window: -1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := defaultConfig()
			tc.change(&c)
			err := c.Validate()
			for _, want := range tc.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q in it", err, want)
				}
			}
			if got := len(strings.Split(errorText(err), "\n")); len(tc.want) < 3 && got != 1 {
				t.Errorf("%d errors, want one: %v", got, err)
			}
		})
	}
	c := defaultConfig()
	c.Listen, c.BasicAuthDir = ":8080", "/run/secrets"
	if err := c.Validate(); err != nil {
		t.Errorf("all addresses with credentials: %v", err)
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// TestValidateKnowsEveryField checks that the table above is complete: a new field needs a line
// there, or here the reason why it has none.
func TestValidateKnowsEveryField(t *testing.T) {
	free := map[string]string{
		"images": "any folder may come to be there later", "basicAuthDir": "read, and complained about, when up opens it",
		"registry.auth": "read, and complained about, when a registry asks for it", "log.level": "its type knows what is a level", "isolation.hostNetwork": "any value is a decision",
		"isolation.cniConf": "read, and complained about, when up opens it", "isolation.cniBinDir": "plugins are searched, and complained about, when up opens isolation.cniConf",
	}
	// A value that is wrong wherever it is.
	c := Config{Listen: "x", Runtime: RuntimeConfig{Classes: "x", CDIDevices: "/dev/null", Spares: -1}, Node: NodeConfig{Memory: 1, None: true, Devices: "-1"}, ORT: "/none", ImageRate: 1, Requests: RequestsConfig{Timeout: -1, MaxTimeout: -2}, Control: ControlConfig{DrainTimeout: -1, Budget: -1, Record: "/none/x"}, Journal: JournalConfig{Sync: -1}}
	c.Registry.Default, c.Registry.Insecure, c.Telemetry.OTLP = "x", []string{"y"}, "z"
	c.Control.Policies = policy.Names{Allocator: "a", Corrector: "b", Sharer: "c", Placer: "d", Warmer: "e", Rank: "f", Route: "g", Price: -1}
	text := errorText(c.Validate())
	c.Requests.TrustedProxies = []string{"lb"}
	c.Cluster = ClusterConfig{Listen: "x", Advertise: "x", LeadWithoutSecrets: true, JoinSecret: "x", FollowCordons: true}
	c.NATS.Listen = "x" // without which node.none is wrong
	c.Kubernetes = KubernetesConfig{Secrets: true, Objects: true, OptIn: true}
	text += "\n" + errorText(c.Validate())
	c.Cluster.Key, c.Kubernetes.Namespaces = "/none", []string{"X"}
	c.NATS = NATSConfig{URLs: []string{"x"}, Creds: "/none", CA: "/none", Cert: "/none", Key: "/none", Replicas: 2, Wait: -1}
	text += "\n" + errorText(c.Validate())
	var walk func(prefix string, of reflect.Type)
	walk = func(prefix string, of reflect.Type) {
		for i := range of.NumField() {
			f := of.Field(i)
			if !f.IsExported() { // no file sets it
				continue
			}
			path := prefix + f.Tag.Get("yaml")
			if f.Type.Kind() == reflect.Struct {
				walk(path+".", f.Type)
			} else if !strings.Contains("\n"+text, "\n"+path+": ") && free[path] == "" {
				t.Errorf("field %s: a wrong value is not complained about in\n%s", path, text)
			}
		}
	}
	walk("", reflect.TypeFor[Config]())
}

func TestUpConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yml")
	write := func(t *testing.T, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(t, "listen: 127.0.0.1:1\nstate: from-file\nnode: {memory: 2Gi}\nrequests: {timeout: 3s, maxBody: 64Ki}\njournal: {bytes: 20971520}\n")
	c, _, err := upConfig([]string{"--state", "from-flag", "--config", file})
	if err != nil {
		t.Fatal(err)
	}
	want := defaultConfig()
	want.Listen, want.State, want.Node.Memory = "127.0.0.1:1", "from-flag", 2<<30
	want.Requests.Timeout, want.Requests.MaxBody, want.Journal.Bytes = 3*time.Second, 64<<10, 20<<20
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	write(t, "requests: {trustedProxies: [10.0.0.0/8]}\n")
	for flags, want := range map[string][]string{"": {"10.0.0.0/8"}, "--trusted-proxies=192.0.2.1,fd00::/8": {"192.0.2.1", "fd00::/8"}} {
		if c, _, err := upConfig(append(strings.Fields(flags), "--config", file)); err != nil || !slices.Equal(c.Requests.TrustedProxies, want) {
			t.Errorf("%q: trusted proxies %q, %v, want %q", flags, c.Requests.TrustedProxies, err, want)
		}
	}
	write(t, "control: {policies: {price: 0.5}}\n")
	for flags, want := range map[string]float64{"": 0.5, "--price=3": 3, "--price=0": 0} {
		if c, _, err := upConfig(append(strings.Fields(flags), "--config", file)); err != nil || c.Control.Policies.Price != want {
			t.Errorf("%q: price %g, %v, want %g", flags, c.Control.Policies.Price, err, want)
		}
	}
	if _, _, err := upConfig([]string{"--price", "NaN"}); err == nil || !strings.Contains(err.Error(), "control.policies.price: NaN, want 0 to 1000000") {
		t.Errorf("got %v", err)
	}
	for name, tc := range map[string]struct{ text, want string }{
		"unknown field":  {"requests: {timeuot: 3s}", "field timeuot not found"},
		"unknown at top": {"x: 1", "line 1: field x not found"},
		"not a size":     {"node: {memory: much}", `"much", want a number of bytes`},
		"not a duration": {"control: {tick: often}", "often"},
		"bad value":      {"control: {tick: 1ms}", "control.tick: 1ms"},
	} {
		t.Run(name, func(t *testing.T) {
			write(t, tc.text)
			if _, _, err := upConfig([]string{"--config", file}); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
	write(t, "")
	if _, _, err := upConfig([]string{"--config", file}); err != nil {
		t.Errorf("an empty file: %v", err)
	}
	if _, _, err := upConfig([]string{"--config", file + ".none"}); err == nil {
		t.Error("a file that is not there")
	}
}

func TestBytesParsesBinaryUnits(t *testing.T) {
	for text, want := range map[string]Bytes{"0": 0, "123": 123, "64Ki": 64 << 10, "512Mi": 512 << 20, "4Gi": 4 << 30} {
		var b Bytes
		if err := yaml.Unmarshal([]byte(text), &b); err != nil || b != want {
			t.Errorf("%s: %d, %v, want %d", text, b, err, want)
		}
	}
	for _, text := range []string{"", "-1", "1.5Gi", "1 Gi", "1G", "x", "Ki", "9999999999Gi", "1Kii", "1MiKi", "+1", "1\n"} {
		var b Bytes
		if err := b.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q: %d, want an error", text, b)
		}
	}
}
