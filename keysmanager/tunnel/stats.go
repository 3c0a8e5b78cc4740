package tunnel

// Stats counts a Tunnel's connections, streams and bytes.
type Stats struct {
	Connections    int    // that are open
	Streams        int    // that are open, of both sides
	Sent, Received uint64 // bytes of TLS since the start
}

// Stats returns the current counts.
func (t *Tunnel) Stats() Stats {
	t.mu.Lock()
	open := t.peers.sessions()
	t.mu.Unlock()
	out := Stats{Connections: len(open), Sent: t.sent.Load(), Received: t.received.Load()}
	for _, s := range open {
		out.Streams += int(s.open.Load())
	}
	return out
}
