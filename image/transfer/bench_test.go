package transfer

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
)

// selfSigned returns the configurations of both sides of a TLS 1.3 connection.
func selfSigned(b *testing.B) (server, client *tls.Config) {
	b.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"peer"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		b.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		b.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	server = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS13}
	return server, &tls.Config{RootCAs: roots, ServerName: "peer", MinVersion: tls.VersionTLS13}
}

// imageSize returns the size of the model to fetch, in MiB.
func imageSize(b *testing.B) int {
	b.Helper()
	if s := os.Getenv("IMAGE_MIB"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			b.Fatal(err)
		}
		return n
	}
	return 1024
}

// BenchmarkFetch fetches an image with a model of IMAGE_MIB (1024) over TLS into an empty store on
// the disk of TMPDIR. Before and after each fetch, it sends as many bytes over a bare TLS
// connection with the same cipher. It reports both speeds and their ratio, the processor time of
// both sides together, and the speed of SHA-256 alone.
func BenchmarkFetch(b *testing.B) {
	size := imageSize(b) << 20
	from, digest := filled(b, size)
	serverTLS, clientTLS := selfSigned(b)
	l, err := tls.Listen("tcp", "127.0.0.1:0", serverTLS)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	served := make(chan error, 1)
	go func() { served <- newServer(from, nil).Serve(ctx, l) }()
	defer func() { cancel(); <-served }()
	peer := Peer("a", func(ctx context.Context) (net.Conn, error) {
		return (&tls.Dialer{Config: clientTLS}).DialContext(ctx, "tcp", l.Addr().String())
	})
	var raw, fetch, hash time.Duration
	var rawCPU, fetchCPU time.Duration
	var raws, fetches int
	for b.Loop() {
		cpu := cpuTime(b)
		raw += bareTLS(b, serverTLS, clientTLS, size)
		rawCPU += cpuTime(b) - cpu
		to := newStore(b, b.TempDir())
		f := NewFetcher(FetcherConfig{Store: to, Log: slog.New(slog.DiscardHandler)})
		begin := time.Now()
		cpu = cpuTime(b)
		if err := f.Fetch(b.Context(), digest, []Source{peer}); err != nil {
			b.Fatal(err)
		}
		fetch += time.Since(begin)
		fetchCPU += cpuTime(b) - cpu
		f.Close()
		if err := os.RemoveAll(image.Dir(to)); err != nil {
			b.Fatal(err)
		}
		raw += bareTLS(b, serverTLS, clientTLS, size)
		hash += hashed(size)
		raws, fetches = raws+2, fetches+1
	}
	perSecond := func(n int, took time.Duration) float64 { return float64(n) * float64(size) / 1e6 / took.Seconds() }
	b.ReportMetric(perSecond(raws, raw), "tls-MB/s")
	b.ReportMetric(perSecond(fetches, fetch), "fetch-MB/s")
	b.ReportMetric(perSecond(fetches, hash), "sha256-MB/s")
	b.ReportMetric(100*perSecond(fetches, fetch)/perSecond(raws, raw), "%-of-tls")
	gigabytes := float64(fetches) * float64(size) / 1e9
	b.ReportMetric(rawCPU.Seconds()/gigabytes, "tls-cpu-s/GB")
	b.ReportMetric(fetchCPU.Seconds()/gigabytes, "fetch-cpu-s/GB")
	b.ReportMetric(0, "ns/op")
}

// bareTLS sends bytes over a new TLS connection, and returns how long they took.
func bareTLS(b *testing.B, server, client *tls.Config, size int) time.Duration {
	b.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	sent := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			sent <- err
			return
		}
		defer c.Close()
		buf := make([]byte, chunk)
		for n := 0; n < size && err == nil; n += len(buf) {
			_, err = c.Write(buf)
		}
		sent <- err
	}()
	begin := time.Now()
	c, err := tls.Dial("tcp", l.Addr().String(), client)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, chunk)
	n := 0
	for err == nil {
		var m int
		m, err = c.Read(buf)
		n += m
	}
	took := time.Since(begin)
	if err := <-sent; err != nil || n < size {
		b.Fatalf("%d bytes, %v", n, err)
	}
	return took
}

// cpuTime returns the processor time of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func hashed(size int) time.Duration {
	h, buf := sha256.New(), make([]byte, chunk)
	begin := time.Now()
	for n := 0; n < size; n += len(buf) {
		_, _ = h.Write(buf)
	}
	_, _ = io.Discard.Write(h.Sum(nil))
	return time.Since(begin)
}
