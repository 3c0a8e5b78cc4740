package queue

import (
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// Access is what a process on another machine connects with.
type Access struct {
	// User returns the user's token, which [Keys] has signed. It is asked for each connection. nil:
	// the connection has no user.
	User func() (string, error)
	Seed string      // the user's secret key, see [NewUser]; empty: the token alone is enough
	TLS  *tls.Config // nil: the connection is not encrypted
	// Refused is called when the server refuses the user. The error is ErrRefused, and ErrRevoked if
	// the server says that. nil: nothing is called.
	Refused func(error)
	// NoTLS is called with ErrNoTLS when a server does not speak TLS. nil: nothing is called.
	NoTLS func(error)
}

// Bearer returns the access of a user whose token alone is enough.
func Bearer(token string, c *tls.Config) Access {
	return Access{User: func() (string, error) { return token, nil }, TLS: c}
}

// reporting returns the access with a function that is called when the server's certificate is
// refused. The client of NATS reports that only of its first attempt to connect.
func (a Access) reporting(failed func(error)) Access {
	if a.TLS == nil || a.TLS.VerifyConnection == nil {
		return a
	}
	verify := a.TLS.VerifyConnection
	a.TLS = a.TLS.Clone()
	a.TLS.VerifyConnection = func(s tls.ConnectionState) error {
		err := verify(s)
		if err != nil {
			failed(err)
		}
		return err
	}
	return a
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
	var out []nats.Option
	if a.User != nil {
		out = append(out, nats.UserJWT(a.User, sign))
	}
	if a.TLS != nil {
		out = append(out, nats.Secure(a.TLS))
	}
	return out
}

// ErrRefused means that a server does not accept a user: its token is wrong, expired or revoked.
// ErrRevoked means that it was connected, and is revoked now. ErrNoTLS means that the connection
// would not be encrypted.
var (
	ErrRefused = errors.New("queue: the NATS server refuses the user")
	ErrRevoked = errors.New("queue: the user was revoked")
	ErrNoTLS   = errors.New("queue: the NATS server does not speak TLS")
)

// Probe tries once to connect. If the server refuses the user, the error is ErrRefused.
func Probe(url string, a Access) error {
	nc, err := nats.Connect(url, append(a.options(), nats.Timeout(probeTimeout), nats.NoReconnect())...)
	if err != nil {
		return fmt.Errorf("connect to nats at %q: %w", url, classified(err))
	}
	nc.Close()
	return nil
}

// classified makes an error of a connection one of those above, if it is one.
func classified(err error) error {
	switch {
	case refused(err):
		return refusedUser(err)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return fmt.Errorf("%w: %w", ErrNoTLS, err)
	}
	return err
}

const probeTimeout = 2 * time.Second

func refusedUser(err error) error {
	if errors.Is(err, nats.ErrAuthRevoked) {
		return fmt.Errorf("%w: %w: %w", ErrRefused, ErrRevoked, err)
	}
	return fmt.Errorf("%w: %w", ErrRefused, err)
}

// refused reports whether a server has refused a user.
func refused(err error) bool {
	return errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, nats.ErrAuthRevoked) || errors.Is(err, nats.ErrAccountAuthExpired)
}
