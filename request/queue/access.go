package queue

import (
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// Access is what a process of another machine connects with.
type Access struct {
	// User returns the user's token, which [Keys] has signed. It is asked for each connection.
	User func() (string, error)
	Seed string      // the user's secret key, see [NewUser]; empty: the token alone is enough
	TLS  *tls.Config // nil: the connection is not encrypted
	// Refused is called when the server refuses the user. nil: nothing is.
	Refused func(error)
}

// Bearer returns the access of a user whose token alone is enough.
func Bearer(token string, c *tls.Config) Access {
	return Access{User: func() (string, error) { return token, nil }, TLS: c}
}

// options returns the options of a connection with this access.
func (a Access) options() []nats.Option {
	sign := func([]byte) ([]byte, error) { return nil, nil } // the server does not look at it
	if a.Seed != "" {
		sign = func(nonce []byte) ([]byte, error) {
			key, err := nkeys.FromSeed([]byte(a.Seed))
			if err != nil {
				return nil, fmt.Errorf("nats user: %w", err)
			}
			defer key.Wipe()
			return key.Sign(nonce)
		}
	}
	out := []nats.Option{nats.UserJWT(a.User, sign)}
	if a.TLS != nil {
		out = append(out, nats.Secure(a.TLS))
	}
	return out
}

// ErrRefused means that a server does not accept a user: its token is wrong, expired or revoked.
var ErrRefused = errors.New("queue: the NATS server refuses the user")

// Probe tries once to connect. If the server refuses the user, the error is ErrRefused.
func Probe(url string, a Access) error {
	nc, err := nats.Connect(url, append(a.options(), nats.Timeout(probeTimeout), nats.NoReconnect())...)
	if err != nil {
		if refused(err) {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		return fmt.Errorf("connect to nats at %q: %w", url, err)
	}
	nc.Close()
	return nil
}

const probeTimeout = 2 * time.Second

// refused reports whether a server has refused a user.
func refused(err error) bool {
	return errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, nats.ErrAuthRevoked) || errors.Is(err, nats.ErrAccountAuthExpired)
}
