// Command stubborn is a function's program that listens on port 8080, on all addresses, and reads
// no environment for it. Its answer names the function and the revision that its environment has.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, os.Getenv("function_name")+" "+os.Getenv("revision"))
	})
	fmt.Fprintln(os.Stderr, http.ListenAndServe(":8080", nil))
	os.Exit(1)
}
