package bench

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// LoadResult is the result of one window of load.
type LoadResult struct {
	Requests int           `json:"requests"`
	Elapsed  time.Duration `json:"elapsed"`
	P50      time.Duration `json:"p50"`
	P99      time.Duration `json:"p99"`    // of all requests, however few
	Failed   int           `json:"failed"` // another status than 200, or another body than was sent
	Cause    string        `json:"cause"`  // of the first failure
}

// Client is a way to send requests.
type Client string

// The clients of Load.
const (
	// NetHTTP is Go's own client, as load generators and Go programs use it.
	NetHTTP Client = "net/http"
	// Lean writes and reads HTTP/1.1 by itself, and needs about a fifth of NetHTTP's processor time.
	// The servers get the processor time that it saves, so the difference between servers is easier to
	// see.
	Lean Client = "lean"
)

// Load posts body to http://addr/path over c connections for the time d. Each connection has one
// request at a time. An answer counts as failed unless it is 200 and repeats the body. For an async
// function, an answer must be 202 and empty instead.
func Load(ctx context.Context, client Client, addr, path string, c int, d time.Duration, body []byte) (LoadResult, error) {
	one := loadLean
	if client == NetHTTP {
		one = loadNetHTTP
	}
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		all  []time.Duration
		out  LoadResult
		fail error
	)
	start := time.Now()
	for range c {
		wg.Go(func() {
			lat, failed, cause, err := one(ctx, addr, path, body)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, lat...)
			out.Failed += failed
			if out.Cause == "" {
				out.Cause = cause
			}
			if fail == nil {
				fail = err
			}
		})
	}
	wg.Wait()
	out.Elapsed = time.Since(start)
	out.Requests = len(all)
	slices.Sort(all)
	out.P50, _ = Quantile(all, 0.5)
	if len(all) > 0 {
		out.P99 = all[len(all)*99/100]
	}
	return out, fail
}

func loadLean(ctx context.Context, addr, path string, body []byte) (lat []time.Duration, failed int, cause string, err error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, 0, "", err
	}
	defer conn.Close()
	r := bufio.NewReaderSize(conn, 16<<10)
	req := fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%s", path, addr, len(body), body)
	for ctx.Err() == nil {
		t := time.Now()
		if err := conn.SetDeadline(t.Add(30 * time.Second)); err != nil {
			return nil, 0, "", err
		}
		if _, err := conn.Write(req); err != nil {
			return nil, 0, "", err
		}
		status, got, err := readResponse(r)
		if err != nil {
			return nil, 0, "", fmt.Errorf("response of %s%s: %w", addr, path, err)
		}
		lat = append(lat, time.Since(t))
		if !answered(path, status, got, body) {
			failed++
			cause = fmt.Sprintf("status %d, body %.200q", status, got)
		}
	}
	return lat, failed, cause, nil
}

func loadNetHTTP(ctx context.Context, addr, path string, body []byte) (lat []time.Duration, failed int, cause string, err error) {
	transport := &http.Transport{MaxIdleConnsPerHost: 1, MaxConnsPerHost: 1, DisableCompression: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	for ctx.Err() == nil {
		t := time.Now()
		//nolint:noctx // the window ends between requests
		resp, err := client.Post("http://"+addr+path, "application/octet-stream", bytes.NewReader(body))
		if err != nil {
			return nil, 0, "", err
		}
		got, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close() // read to its end
		if err != nil {
			return nil, 0, "", err
		}
		lat = append(lat, time.Since(t))
		if !answered(path, resp.StatusCode, got, body) {
			failed++
			cause = fmt.Sprintf("status %d, body %.200q", resp.StatusCode, got)
		}
	}
	return lat, failed, cause, nil
}

// answered reports whether an answer is the one that Load wants.
func answered(path string, status int, got, body []byte) bool {
	if strings.HasPrefix(path, "/async-function/") {
		return status == http.StatusAccepted && len(got) == 0
	}
	return status == http.StatusOK && bytes.Equal(got, body)
}

// readResponse reads one response with a Content-Length. The compared servers send no other
// responses.
func readResponse(r *bufio.Reader) (status int, body []byte, err error) {
	length := -1
	for first := true; ; first = false {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return 0, nil, err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case first:
			if len(line) < 12 {
				return 0, nil, fmt.Errorf("status line %q", line)
			}
			if status, err = strconv.Atoi(string(line[9:12])); err != nil {
				return 0, nil, fmt.Errorf("status line %q", line)
			}
		case len(line) == 0:
			if length < 0 {
				return 0, nil, fmt.Errorf("status %d without Content-Length", status)
			}
			body = make([]byte, length)
			_, err = io.ReadFull(r, body)
			return status, body, err
		case len(line) > 16 && bytes.EqualFold(line[:16], []byte("Content-Length: ")):
			if length, err = strconv.Atoi(string(line[16:])); err != nil {
				return 0, nil, err
			}
		}
	}
}

// Echo serves a bare net/http echo on l until ctx ends. The figures of Hop are relative to it.
func Echo(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/function/", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_, _ = w.Write(b) // the client may be gone
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}
