package client

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/provider"
)

// DefaultGateway is the address of a gateway that nobody has named.
const DefaultGateway = "http://127.0.0.1:8080"

// AuthDirEnv names a folder with the files basic-auth-user and basic-auth-password, as `up
// --basic-auth-dir` has them. A pod mounts a Secret there, so that no command line has the
// password.
const AuthDirEnv = "STAGECOACH_BASIC_AUTH_DIR"

// Dial returns a client for a gateway, by default the one that the environment names. It uses the
// credentials in the URL, or else those in the folder of AuthDirEnv, or else those of
// `faas-cli login`.
func Dial(gateway string) (*Client, error) {
	gateway = cmp.Or(gateway, os.Getenv("OPENFAAS_URL"), DefaultGateway)
	if !strings.Contains(gateway, "://") { // as faas-cli takes it
		gateway = "http://" + gateway
	}
	if u, err := url.Parse(gateway); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		_, shown, _ := strings.Cut("@"+gateway, "@") // no password
		return nil, fmt.Errorf("gateway %q, want a URL such as %s", shown[strings.LastIndexByte(shown, '@')+1:], DefaultGateway)
	}
	c := New(gateway)
	if c.User != "" {
		return c, nil
	}
	dir := os.Getenv(AuthDirEnv)
	if dir == "" {
		return c, c.login()
	}
	credentials, err := provider.ReadCredentials(dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", AuthDirEnv, err)
	}
	c.User, c.Pass = credentials.User, credentials.Password
	return c, nil
}

// login takes the credentials that `faas-cli login` has left for this gateway; there may be none.
func (c *Client) login() error {
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
		if !strings.EqualFold(strings.TrimSuffix(a.Gateway, "/"), c.Base) {
			continue
		}
		if a.Auth != "basic" {
			return fmt.Errorf("%s: %s logs in to %s with %q, want basic: faas-cli login --gateway %[3]s", file, "auths", c.Base, a.Auth)
		}
		pair, err := base64.StdEncoding.DecodeString(a.Token)
		user, password, ok := strings.Cut(string(pair), ":")
		if err != nil || !ok {
			return fmt.Errorf("%s: the token for %s is none of user:password: faas-cli login --gateway %[2]s", file, c.Base)
		}
		c.User, c.Pass = user, password
	}
	return nil
}
