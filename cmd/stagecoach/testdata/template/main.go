// Command template is a function as templates make them, for the tests of who answers. It listens on
// a fixed port, which the tests choose (template_port) and the function names as its upstream_url,
// and does not read the variable port. Its answer names the function and the revision that its
// environment has.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	answer := os.Getenv("function_name") + " " + os.Getenv("revision")
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, answer) })
	fmt.Fprintln(os.Stderr, http.ListenAndServe("127.0.0.1:"+os.Getenv("template_port"), nil))
	if os.Getenv("stays") == "" {
		os.Exit(1)
	}
	select {} // as one that goes on without its server
}
