// Command ofwatchdog is an image's entrypoint as of-watchdog is one: it starts the function's
// program, hands it what comes to port 8080, has metrics on port 8081, and ends when it cannot
// listen on both. The program is this one again, with an argument: it listens on 127.0.0.1:8082,
// and its answer names the function and the revision that its environment has.
package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
)

const behind = "127.0.0.1:8082"

func main() {
	if len(os.Args) > 1 {
		http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = fmt.Fprint(w, os.Getenv("function_name")+" "+os.Getenv("revision"))
		})
		fail(http.ListenAndServe(behind, nil))
	}
	program := exec.Command("/proc/self/exe", "program")
	program.Stdout, program.Stderr = os.Stdout, os.Stderr
	if err := program.Start(); err != nil {
		fail(err)
	}
	metrics, err := net.Listen("tcp", ":8081")
	if err != nil {
		fail(err)
	}
	go func() {
		fail(http.Serve(metrics, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "http_requests_total 0") })))
	}()
	function := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: behind})
	http.HandleFunc("/_/ready", func(w http.ResponseWriter, _ *http.Request) {
		conn, err := net.Dial("tcp", behind)
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_ = conn.Close()
	})
	http.Handle("/", function)
	fail(http.ListenAndServe(":8080", nil))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
