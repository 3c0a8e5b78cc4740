package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/network"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
)

// defaultNetwork has the addresses of replicas unless the operator says otherwise.
const defaultNetwork = "10.231.0.0/16"

// gatewayPort is the port of gateway.openfaas, as users of OpenFaaS know it.
const gatewayPort = 8080

// validNetwork says what is wanted of a prefix for replicas; nil: it is one.
func validNetwork(cidr string) error {
	p, err := netip.ParsePrefix(cidr)
	if err != nil || !p.Addr().Is4() || p != p.Masked() || p.Bits() < 8 || p.Bits() > 20 {
		return errors.New("a prefix of 8 to 20 bits of IPv4 that no network of this machine uses, such as " + defaultNetwork)
	}
	return nil
}

// networks makes the networks of functions. Where it is not possible, functions share the
// machine's.
type networks struct{ *network.Networks }

// openNetworks opens the networks of a Stagecoach process. Role and state tell it from all others
// of the machine, also after a restart.
func openNetworks(cidr, role, state string, log *slog.Logger) (networks, error) {
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil {
		return networks{}, fmt.Errorf("isolation.network: %w", err)
	}
	abs, err := filepath.Abs(state)
	if err != nil {
		return networks{}, fmt.Errorf("state: %w", err)
	}
	n, err := network.Open(network.Config{CIDR: prefix, Run: sandbox.RunFolder, Owner: role + " " + abs, Log: log})
	if errors.Is(err, network.ErrUnavailable) {
		log.Warn("functions share the machine's network", "why", err)
		return networks{}, nil
	}
	return networks{n}, err
}

// forKeys are the networks as a KeysManager takes them.
func (n networks) forKeys() keysmanager.Networks {
	if n.Networks == nil {
		return nil
	}
	return n
}

// Lonely implements keysmanager.Networks.
func (networks) Lonely() (*os.File, error) { return network.Lonely() }

func (n networks) close() error {
	if n.Networks == nil {
		return nil
	}
	return n.Close()
}

// gateway is where functions reach functions of this process; empty: nowhere.
func (n networks) gateway() string {
	if n.Networks == nil {
		return ""
	}
	return netip.AddrPortFrom(n.Gateway(), gatewayPort).String()
}

// gatewayName is how functions call the gateway, and how their callbacks may.
const gatewayName = "gateway.openfaas:8080"

// dial connects to an address of a callback.
func (n networks) dial(ctx context.Context, kind, address string) (net.Conn, error) {
	if at := n.gateway(); at != "" && address == gatewayName {
		address = at
	}
	return new(net.Dialer).DialContext(ctx, kind, address)
}

// dialInside connects to an address of a callback that a function has asked for, if functions reach
// it.
func (n networks) dialInside(ctx context.Context, kind, address string) (net.Conn, error) {
	if n.Networks == nil || address == gatewayName {
		return n.dial(ctx, kind, address)
	}
	refused := func() error {
		return fmt.Errorf("%s is out of the reach of functions, and so of their callbacks: %w", address, gateway.ErrRefused)
	}
	d := net.Dialer{Control: func(_, resolved string, _ syscall.RawConn) error {
		if to, err := netip.ParseAddrPort(resolved); err != nil || !n.Reaches(to.Addr()) {
			return refused()
		}
		return nil
	}}
	c, err := d.DialContext(ctx, "tcp4", address) // functions have no IPv6
	var none *net.AddrError
	if errors.As(err, &none) {
		return nil, refused()
	}
	return c, err
}

// listenInside listens where functions reach the gateway. It returns nil if functions have no
// networks, or if the listener front, on all addresses of the machine, gets what they send, too.
func (u *up) listenInside(front net.Addr) (net.Listener, error) {
	at := u.networks.gateway()
	if at == "" || coversGateway(front) {
		return nil, nil
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("listen for functions, which call the gateway at port %d: %w; no other program may listen on that port of all addresses", gatewayPort, err)
	}
	return l, nil
}

// coversGateway reports whether a listener on an address gets what functions send to the gateway.
func coversGateway(front net.Addr) bool {
	a, ok := front.(*net.TCPAddr)
	return ok && a.IP.IsUnspecified() && a.Port == gatewayPort
}

// byAddress serves requests that come to the gateway's address of functions as theirs, whichever
// listener has accepted them.
func (u *up) byAddress() http.Handler {
	if u.networks.Networks == nil {
		return u.handler
	}
	gateway := u.networks.Gateway()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := u.handler
		if at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && at.AddrPort().Addr().Unmap() == gateway {
			h = u.inside
		}
		h.ServeHTTP(w, r)
	})
}

// guardedInside serves management to functions: only to those that know the credentials.
func guardedInside(api *provider.Provider, credentials *provider.Credentials, next http.Handler) http.Handler {
	if credentials != nil {
		return api.GuardInside(next)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "functions reach only /function/, /async-function/ and /v2/ here: managing needs credentials, and this stagecoach has none (--basic-auth-dir)",
			http.StatusUnauthorized)
	})
}
