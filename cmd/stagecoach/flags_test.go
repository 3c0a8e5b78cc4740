package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestHelpSucceedsAndFlagErrorsAreOneLine checks that help goes to standard output without an
// error, and that the error for a wrong flag or argument is one line.
func TestHelpSucceedsAndFlagErrorsAreOneLine(t *testing.T) {
	for args, want := range map[string]struct{ out, err string }{
		"list --help":       {out: "stagecoach list: the functions of a running stagecoach\n  -gateway string"},
		"describe --help":   {out: "stagecoach describe NAME: what is known of a function\n  -gateway string"},
		"cache warm --help": {out: "stagecoach cache warm FUNCTION\n  -gateway string"},
		"--version":         {out: "stagecoach "},
		"load --help":       {out: "stagecoach load FUNCTION --rate 20"},
		"up -h":             {out: "-basic-auth-dir"},
		"list --bogus":      {err: "list: flag provided but not defined: -bogus; `stagecoach list --help` lists the flags"},
		"secret list --x 1": {err: "secret list: flag provided but not defined: -x; `stagecoach secret list --help` lists the flags"},
		"list x":            {err: `list: got argument "x", want flags alone`},
		"demo x":            {err: `demo: got argument "x", want flags alone`},
		"version x":         {err: `version: got argument "x", want flags alone`},
		"load --slo 1s a b": {err: `load: got ["a" "b"], want one function`},
		"dead show":         {err: "dead show: got [], want an ID"},
	} {
		var out bytes.Buffer
		err := run(t.Context(), strings.Fields(args), &out)
		if want.err == "" && (err != nil || !strings.Contains(out.String(), want.out)) {
			t.Errorf("%s: error %v, printed %q, want %q", args, err, out.String(), want.out)
		}
		if want.err != "" && (err == nil || !strings.HasPrefix(err.Error(), want.err) || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%s: error %v, want %q", args, err, want.err)
		}
	}
}

// TestEmptyListIsAnEmptyJSONArray checks that an empty list is [] and not null.
func TestEmptyListIsAnEmptyJSONArray(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("[]")) }))
	defer s.Close()
	var out bytes.Buffer
	if err := run(t.Context(), []string{"list", "--json", "--gateway", s.URL}, &out); err != nil || out.String() != "[]\n" {
		t.Errorf("list: %v, printed %q", err, out.String())
	}
	for _, command := range []string{"secret list", "namespace list", "pipeline list", "node list", "cache list"} {
		out.Reset()
		if err := run(t.Context(), append(strings.Fields(command), "--json", "--gateway", s.URL), &out); err != nil || out.String() != "[]\n" {
			t.Errorf("%s: %v, printed %q", command, err, out.String())
		}
	}
}
