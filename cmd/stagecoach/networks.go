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
	"github.com/stagecoach-serving/stagecoach/keysmanager/network/cni"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
)

// defaultNetwork is the default prefix of the addresses of replicas.
const defaultNetwork = "10.231.0.0/16"

// gatewayPort is the port of gateway.openfaas in OpenFaaS.
const gatewayPort = 8080

// validNetwork returns an error that says what is wanted if cidr is no valid prefix for replicas.
func validNetwork(cidr string) error {
	p, err := netip.ParsePrefix(cidr)
	if err != nil || !p.Addr().Is4() || p != p.Masked() || p.Bits() < 8 || p.Bits() > 20 {
		return errors.New("a prefix of 8 to 20 bits of IPv4 that no network of this machine uses, such as " + defaultNetwork)
	}
	return nil
}

// networks makes the networks of functions. If that is not possible, functions share the machine's
// network.
type networks struct {
	*network.Networks
	plugins *cni.Networks // of the operator; nil: Networks makes all links
}

// networkConfig says which networks functions get.
type networkConfig struct {
	cidr    string
	cni     string // configuration of the operator's CNI plugins, or a folder of some; empty: none
	plugins string // folders of the plugins, with colons between
}

// openNetworks opens the networks of a Stagecoach process. role and state identify the process on
// this machine, also after a restart.
func openNetworks(of networkConfig, role, state string, log *slog.Logger) (networks, error) {
	prefix, err := netip.ParsePrefix(of.cidr)
	if err != nil {
		return networks{}, fmt.Errorf("isolation.network: %w", err)
	}
	abs, err := filepath.Abs(state)
	if err != nil {
		return networks{}, fmt.Errorf("state: %w", err)
	}
	c := network.Config{CIDR: prefix, Run: sandbox.RunFolder, Owner: role + " " + abs, Log: log}
	if of.cni != "" {
		n, err := cni.Open(c, cni.Config{Conf: of.cni, BinDirs: cni.BinDirs(of.plugins)})
		if errors.Is(err, network.ErrUnavailable) {
			err = fmt.Errorf("--cni-conf: %w", err)
		}
		if err != nil {
			return networks{}, err
		}
		return networks{n.Networks, n}, nil
	}
	n, err := network.Open(c)
	if errors.Is(err, network.ErrUnavailable) {
		log.Warn("functions share the machine's network", "why", err)
		return networks{}, nil
	}
	return networks{Networks: n}, err
}

// forKeys returns the networks in the KeysManager's type.
func (n networks) forKeys() keysmanager.Networks {
	if n.Networks == nil {
		return nil
	}
	return n
}

// Lonely implements keysmanager.Networks.
func (networks) Lonely() (*os.File, error) { return network.Lonely() }

// Create implements keysmanager.Networks.
func (n networks) Create() (ns *os.File, resolv string, err error) {
	if n.plugins != nil {
		return n.plugins.Create()
	}
	ns, err = n.Networks.Create()
	return ns, "", err
}

// Kind implements keysmanager.Networks.
func (n networks) Kind() string {
	if n.plugins != nil {
		return n.plugins.Kind()
	}
	return pipeline.NetworkDefault
}

// Ended implements keysmanager.Networks.
func (n networks) Ended() {
	if n.plugins != nil {
		n.plugins.Ended()
	}
}

func (n networks) close() error {
	switch {
	case n.plugins != nil:
		return n.plugins.Close()
	case n.Networks != nil:
		return n.Networks.Close()
	}
	return nil
}

// detach closes the networks, and leaves those of living replicas to the next process with the same
// state folder.
func (n networks) detach() error {
	switch {
	case n.plugins != nil:
		return n.plugins.Detach()
	case n.Networks != nil:
		return n.Networks.Detach()
	}
	return nil
}

// gateway returns the address at which functions reach functions of this process; empty: none.
func (n networks) gateway() string {
	if n.Networks == nil {
		return ""
	}
	return netip.AddrPortFrom(n.Gateway(), gatewayPort).String()
}

// gatewayName is the host name by which functions, and their callbacks, may call the gateway.
const gatewayName = "gateway.openfaas:8080"

// dial connects to the address of a callback.
func (n networks) dial(ctx context.Context, kind, address string) (net.Conn, error) {
	if at := n.gateway(); at != "" && address == gatewayName {
		address = at
	}
	return new(net.Dialer).DialContext(ctx, kind, address)
}

// dialInside connects to the address of a callback that a function has asked for, if functions can
// reach that address.
func (n networks) dialInside(ctx context.Context, kind, address string) (net.Conn, error) {
	if n.Networks == nil || address == gatewayName {
		return n.dial(ctx, kind, address)
	}
	refused := func() error {
		return fmt.Errorf("functions cannot reach %s, so a callback may not use it: %w", address, gateway.ErrRefused)
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

// listenInside listens at the address at which functions reach the gateway. It returns nil if
// functions have no networks. It also returns nil if the listener at front already gets the
// functions' requests, because it listens on all addresses of the machine.
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

// coversGateway reports whether a listener on an address also gets the requests of functions.
func coversGateway(front net.Addr) bool {
	a, ok := front.(*net.TCPAddr)
	return ok && a.IP.IsUnspecified() && a.Port == gatewayPort
}

// byAddress returns the handler of a listener on several addresses. Requests to the gateway's
// address for functions go to the handler for functions, and all others to u.handler.
func (u *up) byAddress() http.Handler {
	var gateway netip.Addr // none
	if u.networks.Networks != nil {
		gateway = u.networks.Gateway()
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := u.handler
		switch at := r.Context().Value(http.LocalAddrContextKey).(type) {
		case farAddr: // a function on another machine
			h = u.inside
		case *net.TCPAddr:
			if at.AddrPort().Addr().Unmap() == gateway {
				h = u.inside
			}
		}
		h.ServeHTTP(w, r)
	})
}

// guardedInside lets functions manage Stagecoach only with its credentials.
func guardedInside(api *provider.Provider, credentials *provider.Credentials, next http.Handler) http.Handler {
	if credentials != nil {
		return api.GuardInside(next)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "functions reach only /function/, /async-function/ and /v2/ here: managing needs credentials, and this stagecoach has none (--basic-auth-dir)",
			http.StatusUnauthorized)
	})
}
