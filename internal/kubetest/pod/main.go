// Command pod is what containers of test clusters run.
//
//	pod pause          waits for a signal
//	pod serve :8080    answers with the host's name
//	pod get URL        prints an answer
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "pause":
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
		<-end
		return nil
	case len(args) == 2 && args[0] == "serve":
		http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
			host, _ := os.Hostname()
			fmt.Fprint(w, host)
		})
		return http.ListenAndServe(args[1], nil) //nolint:gosec // of a test
	case len(args) == 2 && args[0] == "get":
		r, err := (&http.Client{Timeout: 5 * time.Second}).Get(args[1])
		if err != nil {
			return err
		}
		defer r.Body.Close()
		_, err = io.Copy(os.Stdout, r.Body)
		return err
	}
	return fmt.Errorf("%q: want pause, serve ADDRESS or get URL", args)
}
