package queue

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// clientLog logs why clients on other machines cannot connect. Everything else that the server
// logs is dropped: its callers report it.
type clientLog struct {
	log *slog.Logger

	mu   sync.Mutex
	said map[string]time.Time // by the text without the client
}

var _ server.Logger = (*clientLog)(nil)

// Bounds of a clientLog: clients try again several times per second.
const (
	sayAgain = time.Minute
	maxSaid  = 256
)

// Errorf implements server.Logger.
func (l *clientLog) Errorf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if !strings.Contains(text, "TLS handshake error") && !strings.Contains(text, "authentication error") && !strings.Contains(text, "User Authentication") {
		return
	}
	client, what, ok := strings.Cut(text, " - ")
	if i := strings.LastIndex(what, " - "); ok && i >= 0 {
		what = what[i+3:]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if last, known := l.said[what]; known && time.Since(last) < sayAgain {
		return
	}
	if len(l.said) >= maxSaid {
		clear(l.said)
	}
	l.said[what] = time.Now()
	l.log.Warn("a client of NATS was refused", "client", client, "error", what)
}

// The other methods of server.Logger drop what they get.

func (l *clientLog) Warnf(string, ...any)   {}
func (l *clientLog) Noticef(string, ...any) {}
func (l *clientLog) Fatalf(string, ...any)  {}
func (l *clientLog) Debugf(string, ...any)  {}
func (l *clientLog) Tracef(string, ...any)  {}
