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

// Bounds of guessing passwords.
const (
	guessesFree   = 10               // wrong passwords of a client that are answered at once
	guessPause    = time.Second      // before each further one is answered
	guessMemory   = 15 * time.Minute // after the latest one, a client's wrong passwords are forgotten
	guessClients  = 4096             // clients that are remembered
	guessesLate   = 256              // answers that are late at a time; further ones are 429
	guessesLateOf = 4                // of these, of one client
	guessLogEvery = 10 * time.Second // between two lines of the log
)

// guesses slows clients down that try passwords. Only wrong ones get here: who knows the password never waits, and so cannot be
// kept out by somebody else who shares the address.
type guesses struct {
	log *slog.Logger

	mu      sync.Mutex
	clients *simplelru.LRU[netip.Addr, *guesser]
	late    int       // answers that wait
	logged  time.Time // the latest line
	since   int       // wrong passwords since then, of all clients
}

// guesser is a client that has tried passwords.
type guesser struct {
	wrong  int
	latest time.Time
	late   int // answers that wait
}

func newGuesses(log *slog.Logger) *guesses {
	clients, err := simplelru.NewLRU[netip.Addr, *guesser](guessClients, nil)
	if err != nil {
		panic(err) // a size that is not positive
	}
	return &guesses{log: log, clients: clients}
}

// wrong counts a wrong password of a client, and returns when it is to be answered: after a while, or at once. An error says that
// too many of the client's answers wait already, or of all clients'.
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

// errGuesses says that a client tries more passwords at a time than are answered late.
var errGuesses = errors.New("too many wrong passwords at a time; try again later")

// count counts a wrong password. The client is returned if its answer has to be late, and then is counted among those.
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
	if r.Header["Authorization"] != nil { // else nothing was guessed
		if err := g.wrong(r.Context(), client); err != nil {
			w.Header().Set("Retry-After", "1")
			w.Header().Set("Connection", "close") // so that each further try costs a connection
			writeText(w, http.StatusTooManyRequests, err.Error())
			return
		}
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="Restricted"`)
	writeText(w, http.StatusUnauthorized, "invalid credentials")
}
