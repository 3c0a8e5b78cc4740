package provider

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Bounds for guessed passwords.
const (
	guessesFree = 10          // wrong passwords per client that are answered at once
	guessPause  = time.Second // delay before each further one is answered
	// How long a client's wrong passwords are remembered after the last one.
	guessMemory   = 15 * time.Minute
	guessClients  = 4096             // number of clients to remember
	guessesLate   = 256              // concurrent delayed answers; further requests get 429
	guessesLateOf = 4                // of these, per client
	guessLogEvery = 10 * time.Second // interval of log lines
)

// guesses delays clients that guess passwords. Only wrong passwords are passed to it: a client with
// the right password never waits, even if it shares its address with a guesser.
type guesses struct {
	log *slog.Logger

	mu      sync.Mutex
	clients *simplelru.LRU[netip.Addr, *guesser]
	late    int       // number of delayed answers
	logged  time.Time // time of the last log line
	since   int       // wrong passwords of all clients since then
}

// guesser is a client that has sent wrong passwords.
type guesser struct {
	wrong  int
	latest time.Time
	late   int // number of its delayed answers
}

func newGuesses(log *slog.Logger) *guesses {
	clients, err := simplelru.NewLRU[netip.Addr, *guesser](guessClients, nil)
	if err != nil {
		panic(err) // only for a size that is not positive
	}
	return &guesses{log: log, clients: clients}
}

// wrong counts a wrong password of a client, and waits until the request may be answered, which may
// be at once. It returns an error if too many answers are already delayed, for this client or in
// total.
func (g *guesses) wrong(ctx context.Context, client netip.Addr) error {
	c, err := g.count(client)
	if c == nil {
		return err
	}
	t := time.NewTimer(guessPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done(): // the client is gone
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.late--
	c.late--
	return nil
}

// errGuesses means that too many answers to wrong passwords are delayed already.
var errGuesses = errors.New("too many wrong passwords at a time; try again later")

// count counts a wrong password. If the answer must be delayed, it returns the client, and counts
// the answer as delayed.
func (g *guesses) count(client netip.Addr) (*guesser, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	c, ok := g.clients.Get(client)
	if !ok || now.Sub(c.latest) > guessMemory {
		c = &guesser{}
		g.clients.Add(client, c)
	}
	c.wrong++
	c.latest = now
	g.since++
	if c.wrong <= guessesFree {
		return nil, nil
	}
	if now.Sub(g.logged) >= guessLogEvery {
		g.log.Warn("a client tries passwords", "client", client, "wrong", c.wrong, "of all clients since the last line", g.since)
		g.logged, g.since = now, 0
	}
	if g.late >= guessesLate || c.late >= guessesLateOf {
		return nil, errGuesses
	}
	g.late++
	c.late++
	return c, nil
}

// refuse answers a request without the right credentials.
func (g *guesses) refuse(w http.ResponseWriter, r *http.Request, client netip.Addr) {
	if r.Header["Authorization"] != nil { // without a password, nothing was guessed
		if err := g.wrong(r.Context(), client); err != nil {
			w.Header().Set("Retry-After", "1")
			// So that each further guess needs a new connection.
			w.Header().Set("Connection", "close")
			writeText(w, http.StatusTooManyRequests, err.Error())
			return
		}
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="Restricted"`)
	writeText(w, http.StatusUnauthorized, "invalid credentials")
}
