package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestErrorWithoutAGatewaySaysWhatToDo checks that the error says what to do if no gateway listens.
func TestErrorWithoutAGatewaySaysWhatToDo(t *testing.T) {
	t.Setenv("OPENFAAS_CONFIG", t.TempDir())
	err := run(t.Context(), []string{"list", "--gateway", "http://127.0.0.1:1"}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "want a running `stagecoach up` there") {
		t.Errorf("nobody listens: %v", err)
	}
}

// TestNamesInPaths checks that names stay names in paths, whatever characters they have.
func TestNamesInPaths(t *testing.T) {
	var got string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.URL.EscapedPath() + "?" + r.URL.RawQuery
		_, _ = w.Write([]byte("{}"))
	}))
	defer s.Close()
	for command, want := range map[string]string{
		"namespace create|a/b?c":       "/system/namespace/a%2Fb%3Fc?",
		"pipeline describe|a/b":        "/system/pipelines/a%2Fb?",
		"describe|a/b|-n|x y&function": "/system/function/a%2Fb?namespace=x+y%26function&usage=1",
		"invoke|a b?c/d":               "/function/a%20b%3Fc/d?",
	} {
		verbs, rest, _ := strings.Cut(command, "|")
		args := append(strings.Fields(verbs), strings.Split(rest, "|")...)
		if err := run(t.Context(), append(args, "--gateway", s.URL), &bytes.Buffer{}); err != nil || got != want {
			t.Errorf("%q: asked for %s (%v), want %s", args, got, err, want)
		}
	}
}

// TestEscapeSequencesDoNotReachTheTerminal checks that a client removes the escape sequences in a
// server's answers before it prints them.
func TestEscapeSequencesDoNotReachTheTerminal(t *testing.T) {
	const evil = "a\u001b]0;title\u0007\u009b2Jß"
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		one := `{"name":"` + strings.NewReplacer("\x1b", `\u001b`, "\x07", `\u0007`).Replace(evil) + `"}`
		if r.URL.Path == "/system/functions" || r.URL.Path == "/system/pipelines" {
			one = "[" + one + "]"
		}
		_, _ = w.Write([]byte(one))
	}))
	defer s.Close()
	for _, command := range []string{"list", "describe f", "pipeline list", "pipeline describe p"} {
		for _, status = range []int{http.StatusOK, http.StatusTeapot} {
			var out bytes.Buffer
			err := run(t.Context(), append(strings.Fields(command), "--gateway", s.URL), &out)
			text := out.String()
			if err != nil {
				text += err.Error()
			}
			if strings.ContainsAny(text, "\x1b\x07\u009b") || !strings.Contains(text, "ß") {
				t.Errorf("%s, status %d: printed %q", command, status, text)
			}
		}
	}
}
