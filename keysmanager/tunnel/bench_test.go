package tunnel

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/identitytest"
)

// rawTLS returns the ends of a plain TLS connection over loopback.
func rawTLS(t testing.TB) (client, server net.Conn) {
	t.Helper()
	ca := identitytest.New(t, "c1")
	us, them := ca.Source(identity.Control, "up"), ca.Source(identity.Node, "n1")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan *tls.Conn)
	go func() {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		s := tls.Server(c, them.Server())
		if err := s.Handshake(); err != nil {
			panic(err)
		}
		done <- s
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), us.Client(them.Me()))
	if err != nil {
		t.Fatal(err)
	}
	s := <-done
	t.Cleanup(func() { _ = c.Close(); _ = s.Close() })
	return c, s
}

// BenchmarkThroughput compares streams with a plain TLS connection, in turns of 64 MB. The ratio is
// that of the rates.
func BenchmarkThroughput(b *testing.B) {
	const turn = 64 << 20
	piece := make([]byte, 256<<10)
	for _, streams := range []int{1, 64} {
		b.Run(fmt.Sprintf("streams=%d", streams), func(b *testing.B) {
			up, n := pair(b, nil)
			client, server := rawTLS(b)
			read := make(chan struct{})
			go func() {
				p := make([]byte, 256<<10)
				for {
					if _, err := io.ReadFull(server, p); err != nil {
						return
					}
					if p[0] == 1 {
						read <- struct{}{}
					}
				}
			}()
			last := append([]byte{1}, piece[1:]...)
			var plain, tunnel time.Duration
			for b.Loop() {
				begin := time.Now()
				for i := 0; i < turn; i += len(piece) {
					p := piece
					if i+len(piece) == turn {
						p = last
					}
					if _, err := client.Write(p); err != nil {
						b.Fatal(err)
					}
				}
				<-read
				plain += time.Since(begin)
				var all []net.Conn
				for range streams {
					all = append(all, open(b, up, n, "sink"))
				}
				begin = time.Now()
				var wg sync.WaitGroup
				for _, c := range all {
					wg.Go(func() {
						for i := 0; i < turn/streams; i += len(piece) {
							if _, err := c.Write(piece); err != nil {
								panic(err)
							}
						}
						_ = c.(*stream).CloseWrite()
						_, _ = io.ReadAll(c)
					})
				}
				wg.Wait()
				tunnel += time.Since(begin)
				for _, c := range all {
					_ = c.Close()
				}
			}
			b.ReportMetric(turn*float64(b.N)/plain.Seconds()/1e6, "tls-MB/s")
			b.ReportMetric(turn*float64(b.N)/tunnel.Seconds()/1e6, "tunnel-MB/s")
			b.ReportMetric(plain.Seconds()/tunnel.Seconds(), "ratio")
		})
	}
}

// BenchmarkPing measures how long 1 KB takes to a peer and back, on one stream.
func BenchmarkPing(b *testing.B) {
	up, n := pair(b, nil)
	c := open(b, up, n, "echo")
	client, server := rawTLS(b)
	go func() { _, _ = io.Copy(server, server) }()
	p := make([]byte, 1<<10)
	round := func(c net.Conn) time.Duration {
		begin := time.Now()
		if _, err := c.Write(p); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, p); err != nil {
			b.Fatal(err)
		}
		return time.Since(begin)
	}
	var plain, tunnel time.Duration
	for b.Loop() {
		plain += round(client)
		tunnel += round(c)
	}
	b.ReportMetric(float64(plain.Microseconds())/float64(b.N), "tls-µs")
	b.ReportMetric(float64(tunnel.Microseconds())/float64(b.N), "tunnel-µs")
}

// far passes bytes on after a delay in each direction, as a long cable does.
func far(t testing.TB, to string, delay time.Duration) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	type piece struct {
		due time.Time
		b   []byte
	}
	pass := func(to, from net.Conn) {
		pieces := make(chan piece, 64<<10) // the cable holds them
		go func() {
			defer close(pieces)
			for {
				b := make([]byte, 64<<10)
				n, err := from.Read(b)
				if err != nil {
					return
				}
				pieces <- piece{time.Now().Add(delay), b[:n]}
			}
		}()
		for p := range pieces {
			time.Sleep(time.Until(p.due))
			if _, err := to.Write(p.b); err != nil {
				break
			}
		}
		_ = to.Close()
	}
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			other, err := net.Dial("tcp", to)
			if err != nil {
				panic(err)
			}
			go pass(near, other)
			go pass(other, near)
		}
	}()
	return l.Addr().String()
}

// BenchmarkWindow measures one stream over a round trip of 10 ms, with windows of several sizes.
func BenchmarkWindow(b *testing.B) {
	for _, window := range []uint32{256 << 10, 1 << 20, 4 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("window=%dKiB", window>>10), func(b *testing.B) {
			up, n := pair(b, func(c *Config) { c.window = window })
			n.addr = far(b, n.addr, 5*time.Millisecond)
			c := open(b, up, n, "sink")
			piece := make([]byte, 64<<20)
			b.SetBytes(int64(len(piece)))
			for b.Loop() {
				if _, err := c.Write(piece); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
