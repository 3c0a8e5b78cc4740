package queue

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// OutsideServer is a nats-server of a cluster outside, whose users are signed by [Keys].
type OutsideServer struct {
	Name  string // of the server
	Host  string // name or address that others dial
	Port  int    // for clients
	Route int    // port for the other servers
	// host:port of /healthz; empty: on the loopback address, if the server listens for other machines
	Monitor string
}

// Default ports of an OutsideServer.
const (
	defaultPort = 4222
	routeOffset = 2000 // from the port for clients to that for servers

	// From the port for clients to the port of /healthz, which listens on the loopback address.
	monitorOffset = 4000
)

// ParseOutside reads a list of servers with commas between. Each is HOST, HOST:PORT or
// HOST:PORT/ROUTEPORT.
func ParseOutside(list string) ([]OutsideServer, error) {
	var all []OutsideServer
	hosts := map[string]int{}
	for text := range strings.SplitSeq(list, ",") {
		s, err := parseOutside(strings.TrimSpace(text))
		if err != nil {
			return nil, err
		}
		hosts[s.Host]++
		all = append(all, s)
	}
	names := map[string]bool{}
	for i, s := range all {
		all[i].Name = strings.Map(func(r rune) rune {
			if strings.ContainsRune(":/ []%", r) {
				return '-'
			}
			return r
		}, s.Host)
		if hosts[s.Host] > 1 {
			all[i].Name += "-" + strconv.Itoa(s.Port)
		}
		if names[all[i].Name] {
			return nil, fmt.Errorf("servers: %s:%d is listed twice", s.Host, s.Port)
		}
		names[all[i].Name] = true
	}
	return all, nil
}

func parseOutside(text string) (OutsideServer, error) {
	address, route, hasRoute := strings.Cut(text, "/")
	s := OutsideServer{Host: strings.Trim(address, "[]"), Port: defaultPort}
	var err, err2 error
	if host, port, noPort := net.SplitHostPort(address); noPort == nil {
		s.Host = host
		s.Port, err = strconv.Atoi(port)
	}
	if s.Route = s.Port + routeOffset; hasRoute {
		s.Route, err2 = strconv.Atoi(route)
	}
	if errors.Join(err, err2) != nil || s.Host == "" || strings.ContainsAny(s.Host, " \t\"'{}\\") || s.Port < 1 || s.Port > 65535 || s.Route < 1 || s.Route > 65535 {
		return s, fmt.Errorf("servers: %q, want HOST, HOST:PORT or HOST:PORT/ROUTEPORT", text)
	}
	return s, nil
}

// URL returns the address for clients.
func (s OutsideServer) URL() string {
	return "nats://" + net.JoinHostPort(s.Host, strconv.Itoa(s.Port))
}

func (s OutsideServer) route() string { return net.JoinHostPort(s.Host, strconv.Itoa(s.Route)) }

// listen returns the address on which the server listens.
func (s OutsideServer) listen() string {
	if ip, err := netip.ParseAddr(s.Host); err == nil && ip.IsLoopback() {
		return s.Host
	}
	return "0.0.0.0"
}

// monitor returns where the server answers GET /healthz; empty: nowhere.
func (s OutsideServer) monitor() string {
	if port := s.Port + monitorOffset; s.Monitor == "" && s.listen() == "0.0.0.0" && port <= 65535 {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	}
	return s.Monitor
}

// Files of an OutsideServer, in the folder where it is started.
const (
	OutsideConfig    = "nats-server.conf"
	OutsideCert      = "server.crt" // with the authority's certificate behind it
	OutsideKey       = "server.key"
	OutsideRouteCert = "route.crt"
	OutsideRouteKey  = "route.key"
	OutsideRouteCA   = "route-ca.crt"
)

// OutsideConfig returns the configuration of one of the servers of a cluster. Paths in it are
// relative to the folder where the server is started.
func (k *Keys) OutsideConfig(s OutsideServer, all []OutsideServer) ([]byte, error) {
	_, system, systemToken, err := k.operatorClaims()
	if err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	operator, err := k.operatorToken()
	if err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	_, account, err := k.accountClaims(nil)
	if err == nil {
		account, err = k.oldest(account)
	}
	if err == nil {
		systemToken, err = k.oldest(systemToken)
	}
	if err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	var b strings.Builder
	p := func(format string, v ...any) { fmt.Fprintf(&b, format+"\n", v...) }
	p("# Written by `stagecoach cluster init`. Start nats-server 2.12 or later in this folder:")
	p("#   nats-server -c %s", OutsideConfig)
	p("server_name: %q", s.Name)
	p("listen: %q", net.JoinHostPort(s.listen(), strconv.Itoa(s.Port)))
	p("client_advertise: %q", net.JoinHostPort(s.Host, strconv.Itoa(s.Port)))
	if monitor := s.monitor(); monitor != "" {
		p("http: %q # /healthz says whether its streams have caught up", monitor)
	}
	// A server that gets SIGUSR2 hands its streams to the others before it ends.
	p("lame_duck_grace_period: \"1s\"\nlame_duck_duration: \"30s\"")
	p("max_payload: 8MB")
	p("max_pending: 512MB")
	p("jetstream {\n  store_dir: \"data\"\n  max_file_store: 1TB # Stagecoach bounds its streams\n}")
	p("tls {\n  cert_file: %q\n  key_file: %q\n  min_version: \"1.3\"\n  timeout: 10\n}", OutsideCert, OutsideKey)
	if len(all) > 1 {
		p("cluster {\n  name: stagecoach\n  listen: %q\n  advertise: %q", net.JoinHostPort(s.listen(), strconv.Itoa(s.Route)), s.route())
		p("  tls {\n    cert_file: %q\n    key_file: %q\n    ca_file: %q\n    verify: true\n    min_version: \"1.3\"\n    timeout: 10\n  }", OutsideRouteCert, OutsideRouteKey, OutsideRouteCA)
		p("  routes: [")
		for _, other := range all {
			if other.Name != s.Name {
				p("    %q", "nats://"+other.route())
			}
		}
		p("  ]\n}")
	}
	p("# Who may connect: users that the control planes of Stagecoach have signed.")
	p("operator: %s", operator)
	p("system_account: %s", system)
	p("resolver {\n  type: full\n  dir: \"accounts\"\n  allow_delete: false\n  interval: \"30s\"\n}")
	p("resolver_preload: {\n  %s: %s\n  %s: %s\n}", system, systemToken, k.streams, account)
	return []byte(b.String()), nil
}

// oldest returns a token of the operator as if it had been signed in 1970. A server prefers the
// later one of two tokens. So the token in a server's configuration, which knows no revoked user,
// never replaces one that a control plane has sent.
func (k *Keys) oldest(token string) (string, error) {
	header, rest, _ := strings.Cut(token, ".")
	payload, _, _ := strings.Cut(rest, ".")
	b, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return "", err
	}
	claims := map[string]json.RawMessage{}
	if err := json.Unmarshal(b, &claims); err != nil {
		return "", err
	}
	claims["iat"] = json.RawMessage("1")
	if b, err = json.Marshal(claims); err != nil {
		return "", err
	}
	text := header + "." + base64.RawURLEncoding.EncodeToString(b)
	signature, err := k.operator.Sign([]byte(text))
	if err != nil {
		return "", err
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}
