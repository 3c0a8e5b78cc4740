package main

import (
	"cmp"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

const defaultGateway = "http://127.0.0.1:8080"

// apiFlags are of all commands that talk to a running stagecoach.
type apiFlags struct {
	gateway   string
	namespace string
}

func newAPIFlags(fs *flag.FlagSet) *apiFlags {
	f := &apiFlags{}
	fs.StringVar(&f.gateway, "gateway", "", "URL of a running stagecoach; default: $OPENFAAS_URL, then "+defaultGateway)
	fs.StringVar(&f.namespace, "namespace", "", "namespace, in place of the default one")
	fs.StringVar(&f.namespace, "n", "", "short for --namespace")
	return f
}

// open returns a client for the gateway: the flag's, that of the stack file unless it is the default one, the environment's,
// or the default.
func (f *apiFlags) open(inStack string) (*client, error) {
	if inStack == defaultGateway {
		inStack = ""
	}
	return dial(cmp.Or(f.gateway, inStack))
}

// gatewayFlag is the gateway of commands that take no namespace.
func gatewayFlag(fs *flag.FlagSet) *string {
	return fs.String("gateway", "", "URL of a running stagecoach; default: $OPENFAAS_URL, then "+defaultGateway)
}

// dial returns a client for a gateway, by default the environment's, with the credentials in its URL, or else those of
// `faas-cli login`.
func dial(gateway string) (*client, error) {
	gateway = cmp.Or(gateway, os.Getenv("OPENFAAS_URL"), defaultGateway)
	if !strings.Contains(gateway, "://") { // as faas-cli takes it
		gateway = "http://" + gateway
	}
	if u, err := url.Parse(gateway); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		_, shown, _ := strings.Cut("@"+gateway, "@") // no password
		return nil, fmt.Errorf("gateway %q, want a URL such as %s", shown[strings.LastIndexByte(shown, '@')+1:], defaultGateway)
	}
	c := newClient(gateway)
	if c.user != "" {
		return c, nil
	}
	return c, c.login()
}

// query is for the paths that take a namespace.
func (f *apiFlags) query() string {
	if f.namespace == "" {
		return ""
	}
	return "?namespace=" + url.QueryEscape(f.namespace)
}

// login takes the credentials that `faas-cli login` has left for this gateway; there may be none.
func (c *client) login() error {
	dir := os.Getenv("OPENFAAS_CONFIG")
	if ci := os.Getenv("CI"); dir == "" && (ci == "true" || ci == "1") {
		dir = ".openfaas"
	}
	if home, err := os.UserHomeDir(); dir == "" && err == nil {
		dir = filepath.Join(home, ".openfaas")
	}
	file := filepath.Join(dir, "config.yml")
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var config struct {
		Auths []struct{ Gateway, Auth, Token string }
	}
	if err == nil {
		err = yaml.Unmarshal(b, &config)
	}
	if err != nil {
		return fmt.Errorf("credentials of faas-cli login: %s: %w", file, err)
	}
	for _, a := range config.Auths {
		if !strings.EqualFold(strings.TrimSuffix(a.Gateway, "/"), c.base) {
			continue
		}
		if a.Auth != "basic" {
			return fmt.Errorf("%s: %s logs in to %s with %q, want basic: faas-cli login --gateway %[3]s", file, "auths", c.base, a.Auth)
		}
		pair, err := base64.StdEncoding.DecodeString(a.Token)
		user, password, ok := strings.Cut(string(pair), ":")
		if err != nil || !ok {
			return fmt.Errorf("%s: the token for %s is none of user:password: faas-cli login --gateway %[2]s", file, c.base)
		}
		c.user, c.pass = user, password
	}
	return nil
}
