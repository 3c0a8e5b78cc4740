package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// NATSConfig configures NATS: a server inside this process, or a cluster outside.
type NATSConfig struct {
	// host:port where `stagecoach keysmanager` joins with a join token; empty: no node can join.
	Listen       string        `yaml:"listen"`
	Certificates time.Duration `yaml:"certificates"` // lifetime of nodes' certificates

	// URLs of a cluster's servers; empty: a server runs inside this process.
	URLs  []string `yaml:"urls"`
	Creds string   `yaml:"creds"` // file with a JWT and its key
	CA    string   `yaml:"ca"`    // file with the certificates that the servers' are checked against
	Cert  string   `yaml:"cert"`  // file with this process's certificate
	Key   string   `yaml:"key"`   // file with its key
	// Servers that keep each stream; 0: three, or one if the cluster has fewer than three servers.
	Replicas int `yaml:"replicas"`
	// How long the start waits for the first server that answers.
	Wait time.Duration `yaml:"wait"`
}

// joining reports whether nodes can join.
func (c *NATSConfig) joining() bool { return c.Listen != "" || c.outside() }

// outside reports whether other processes run the servers.
func (c *NATSConfig) outside() bool { return len(c.URLs) > 0 }

func (c *NATSConfig) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.Listen, "nats-listen", c.Listen, "host:port where nodes join (stagecoach keysmanager); default nowhere")
	fs.Func("nats", "URLs of a NATS cluster outside, with commas between, such as nats://a:4222,nats://b:4222; default: a server inside this process", func(list string) error {
		c.URLs = strings.Split(list, ",")
		return nil
	})
	fs.StringVar(&c.Creds, "nats-creds", c.Creds, "file with credentials for that cluster")
	fs.StringVar(&c.CA, "nats-ca", c.CA, "file with the certificates that its servers' certificates are checked against")
	fs.StringVar(&c.Cert, "nats-cert", c.Cert, "file with the certificate of this process, for that cluster")
	fs.StringVar(&c.Key, "nats-key", c.Key, "file with the key of that certificate")
}

// validate reports the invalid fields of nats.
func (c *NATSConfig) validate(bad func(path string, got any, want string)) {
	if _, port, err := net.SplitHostPort(c.Listen); c.Listen != "" && (err != nil || port == "") {
		bad("nats.listen", fmt.Sprintf("%q", c.Listen), "host:port, such as 127.0.0.1:4222 for nodes of this machine, or 0.0.0.0:4222")
	}
	if c.Listen != "" && c.outside() {
		bad("nats.listen", fmt.Sprintf("%q", c.Listen), "no address with nats.urls: nodes join the cluster outside")
	}
	for _, server := range c.URLs {
		if u, err := url.Parse(server); err != nil || u.Host == "" || u.Scheme != "nats" && u.Scheme != "tls" && u.Scheme != "ws" && u.Scheme != "wss" {
			bad("nats.urls", fmt.Sprintf("%q", server), "URLs such as nats://a:4222")
		}
	}
	for _, f := range []struct{ path, file string }{{"creds", c.Creds}, {"ca", c.CA}, {"cert", c.Cert}, {"key", c.Key}} {
		if f.file == "" {
			continue
		}
		if !c.outside() {
			bad("nats."+f.path, fmt.Sprintf("%q", f.file), "nats.urls too: the server inside needs no file")
		}
		if _, err := os.Stat(f.file); err != nil {
			bad("nats."+f.path, err, "a file")
		}
	}
	if (c.Cert == "") != (c.Key == "") {
		bad("nats.cert", fmt.Sprintf("%q", c.Cert), "nats.cert and nats.key, or neither")
	}
	if c.Wait < 0 || c.Wait > 0 && !c.outside() {
		bad("nats.wait", c.Wait, "0 or more, and 0 without nats.urls")
	}
	if n := c.Replicas; n < 0 || n > 5 || n > 0 && n%2 == 0 {
		bad("nats.replicas", n, "1, 3 or 5, or 0 for what the cluster has")
	} else if n > 0 && !c.outside() {
		bad("nats.replicas", n, "0: the server inside is one")
	}
}

// openBroker starts the server inside, which listens as server says, or connects to the cluster
// outside. keys are nil without a cluster key.
func (c *Config) openBroker(ctx context.Context, server queue.ServerConfig, keys *clusterKeys) (queue.Broker, error) {
	if n := c.NATS; n.outside() {
		return c.outsideBroker(ctx, queue.ClusterConfig{URLs: n.URLs, Creds: n.Creds, CA: n.CA, Cert: n.Cert, Key: n.Key, Replicas: n.Replicas, Wait: n.Wait, Log: server.Log}, keys)
	}
	server.Dir, server.Sync = filepath.Join(c.State, "nats"), c.Journal.Sync
	if server.Sync == 0 {
		server.Sync = -1 // with each write
	}
	return queue.StartServer(server)
}
