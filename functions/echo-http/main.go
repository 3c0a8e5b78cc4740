// Command echo-http is a function that speaks HTTP, as OpenFaaS's functions do: a program that
// listens on the port in the environment. Documentation and tests use it. Each path shows one
// feature of HTTP.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	ready := time.Now().Add(duration(os.Getenv("ready_after")))
	srv := &http.Server{Addr: "127.0.0.1:" + os.Getenv("port"), Handler: handler(ready), ReadHeaderTimeout: 10 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- srv.ListenAndServe() }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	if err := srv.Shutdown(context.Background()); err != nil {
		return err
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func handler(ready time.Time) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/_/ready", func(w http.ResponseWriter, _ *http.Request) {
		if time.Now().Before(ready) {
			http.Error(w, "the model is still loading", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("/_/health", func(http.ResponseWriter, *http.Request) {})
	for path, f := range map[string]http.HandlerFunc{
		"/echo": echo, "/events": events, "/hints": hints, "/slow": slow, "/status": status, "/trailer": trailer,
		"/exit": exit, "/panic": panics, "/upgrade": upgrade, "/eat": eat, "/spin": spin, "/framing": framing,
	} {
		mux.HandleFunc(path, f)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := mux.Handler(&http.Request{Method: http.MethodPost, Host: r.Host, URL: r.URL}); pattern != "" && !strings.Contains(r.URL.Path, "..") {
			mux.ServeHTTP(w, r)
			return
		}
		show(w, r)
	})
}

// show answers with what the function knows about the request and itself.
func show(w http.ResponseWriter, r *http.Request) {
	secrets := map[string]string{}
	// A function may have no secrets.
	files, _ := filepath.Glob(filepath.Join(os.Getenv("secret_mount_path"), "*"))
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && os.Getenv("secret_mount_path") != "" {
			secrets[filepath.Base(f)] = strconv.Itoa(len(b)) + " bytes" // shows only that the secret exists
		}
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{ // the client may have left
		"method": r.Method, "uri": r.RequestURI, "host": r.Host, "header": r.Header, "body": string(body), "env": os.Environ(),
		"secrets": secrets, "pid": os.Getpid(),
	})
}

// echo sends the body back while it arrives.
func echo(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).EnableFullDuplex() // only HTTP/1 needs it
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	_, _ = io.Copy(w, r.Body) // the client may have left
}

// events sends n server-sent events. Each event except the first waits for a line of the request's
// body, or for a while.
func events(w http.ResponseWriter, r *http.Request) {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex()
	w.Header().Set("Content-Type", "text/event-stream")
	lines := bufio.NewScanner(r.Body)
	for i := range number(r, "n", 3) {
		if i > 0 && r.ContentLength != 0 && !lines.Scan() {
			return
		}
		fmt.Fprintf(w, "data: %d\n\n", i)
		if rc.Flush() != nil {
			return
		}
		pause(r, duration(r.URL.Query().Get("every")))
	}
}

// hints answers 103 before the answer.
func hints(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Link", "</style.css>; rel=preload")
	w.WriteHeader(http.StatusEarlyHints)
	w.Header().Del("Link")
	fmt.Fprintln(w, "done")
}

// slow takes some time before it answers. If the query names the request, slow prints to standard
// error when the request starts, and whether its client left early.
func slow(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	name := r.URL.Query().Get("name")
	if name != "" {
		log.Print("started: ", name)
	}
	if pause(r, duration(r.URL.Query().Get("for"))) {
		fmt.Fprintln(w, "done")
		return
	}
	log.Print("canceled: ", name)
}

// pause waits for d. It reports false if the client left first.
func pause(r *http.Request, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.Context().Done():
		return false
	}
}

func status(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Custom", "kept")
	w.Header().Set("X-OpenFaaS-Internal", "forged")
	code := number(r, "code", http.StatusTeapot)
	w.WriteHeader(code)
	if code != http.StatusNoContent && code != http.StatusNotModified {
		fmt.Fprintln(w, "status", code)
	}
}

func trailer(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Trailer", "X-Sum")
	n, _ := io.Copy(w, r.Body)
	w.Header().Set("X-Sum", strconv.FormatInt(n, 10))
	w.Header().Set("X-Got", r.Trailer.Get("X-Sent"))
}

// eat touches mb MiB of memory and answers with their number.
func eat(w http.ResponseWriter, r *http.Request) {
	mb, _ := strconv.Atoi(r.URL.Query().Get("mb")) // an invalid number means 0
	food := make([]byte, mb<<20)
	for i := 0; i < len(food); i += 4096 {
		food[i] = 1
	}
	fmt.Fprintln(w, len(food)>>20)
}

// spin keeps a core busy for some time.
func spin(w http.ResponseWriter, r *http.Request) {
	n := 0
	for until := time.Now().Add(duration(r.URL.Query().Get("for"))); time.Now().Before(until); n++ {
	}
	fmt.Fprintln(w, n)
}

// exit ends the program. Query parameters choose whether and when:
//   - once=URL: only if that URL answers 201; otherwise the answer is "alive"
//   - read: after 1 MiB of the body has arrived
//   - begun: after half of the answer is sent
func exit(w http.ResponseWriter, r *http.Request) {
	if once := r.URL.Query().Get("once"); once != "" {
		first, err := asksFirst(r.Context(), once)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if !first {
			fmt.Fprintln(w, "alive")
			return
		}
	}
	if r.URL.Query().Has("read") {
		_, _ = io.CopyN(io.Discard, r.Body, 1<<20)
	}
	if r.URL.Query().Has("begun") {
		fmt.Fprintln(w, "half")
		_ = http.NewResponseController(w).Flush()
		pause(r, 300*time.Millisecond) // so that the client has received it
	}
	log.Print("last words")
	os.Exit(number(r, "code", 3))
}

// asksFirst reports whether a URL answers 201.
func asksFirst(ctx context.Context, url string) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, nil)
	if err != nil {
		return false, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	return resp.StatusCode == http.StatusCreated, resp.Body.Close()
}

// framing answers with headers that describe how the body was framed, and sends the body back: in
// chunks if the query says so, otherwise with its length.
func framing(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("X-Length", strconv.FormatInt(r.ContentLength, 10))
	w.Header().Set("X-Coding", strings.Join(r.TransferEncoding, ","))
	w.Header().Set("X-Got", r.Trailer.Get("X-Sent"))
	if r.URL.Query().Has("chunks") {
		w.Header().Set("Trailer", "X-Sum")
		_ = http.NewResponseController(w).Flush()
	} else {
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	_, _ = w.Write(body) // the client may have left
	w.Header().Set("X-Sum", strconv.Itoa(len(body)))
}

func panics(http.ResponseWriter, *http.Request) { panic("on demand") }

// upgrade switches to another protocol, which sends each line back.
func upgrade(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "lines" {
		http.Error(w, "want Upgrade: lines", http.StatusUpgradeRequired)
		return
	}
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer c.Close()
	_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
	for rw.Flush() == nil {
		line, err := rw.ReadString('\n')
		if err != nil {
			return
		}
		_, _ = rw.WriteString("got " + line)
	}
}

func duration(s string) time.Duration {
	d, _ := time.ParseDuration(s) // an invalid duration means 0
	return d
}

func number(r *http.Request, name string, otherwise int) int {
	if n, err := strconv.Atoi(r.URL.Query().Get(name)); err == nil {
		return n
	}
	return otherwise
}
