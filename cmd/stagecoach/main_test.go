package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// actAsMain is the environment variable that makes this test binary run as the program itself. So
// tests run `stagecoach up` as users do: as a separate process, with real NATS, zygotes and models.
// Under -race, the race detector checks that process, too.
const actAsMain = "STAGECOACH_TEST_MAIN"

func TestMain(m *testing.M) {
	natstest.Main()
	// Children that it starts itself, such as a watchdog, have an environment without the variable.
	// They must not run the tests again.
	if os.Getenv(actAsMain) != "" || len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
		main()
		return
	}
	// With -race, a program sleeps for a second at its end unless told otherwise.
	for name, value := range map[string]string{actAsMain: "1", "GORACE": "atexit_sleep_ms=0"} {
		if err := os.Setenv(name, value); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(tests{m})
}

// tests closes the connections that tests keep for each other, before leaks are looked for.
type tests struct{ *testing.M }

func (t tests) Run() int {
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	return t.M.Run()
}

func TestRunPrintsHelpOrNamesWrongArguments(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		out  string // in what is printed
		err  string // in the error; empty: none
	}{
		"help":              {[]string{"help"}, "stagecoach up", ""},
		"nothing":           {nil, "stagecoach demo", ""},
		"version":           {[]string{"version"}, "stagecoach ", ""},
		"unknown":           {[]string{"pu"}, "", `unknown command "pu"; `},
		"bench of nothing":  {[]string{"bench"}, "", "want one of: autoscaler, batch, coldstart, gpu, hop"},
		"bench of what":     {[]string{"bench", "x"}, "", "want one of: autoscaler, batch, coldstart, gpu, hop"},
		"pipeline of what":  {[]string{"pipeline", "x"}, "", "want list or describe NAME"},
		"describe nothing":  {[]string{"pipeline", "describe"}, "", "want one name"},
		"up with arguments": {[]string{"up", "x"}, "", `got argument "x"`},
		"up and log":        {[]string{"up", "--log", "loud"}, "", "flag -log: "},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := run(t.Context(), tc.args, &out)
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Errorf("got error %v, want one with %q", err, tc.err)
			}
			if !strings.Contains(out.String(), tc.out) {
				t.Errorf("printed %q, want %q in it", out.String(), tc.out)
			}
		})
	}
}

// TestBeginAgain opens a control plane that must begin again, and cannot be opened twice.
func TestBeginAgain(t *testing.T) {
	lost := errors.New("no server can be reached")
	for name, tc := range map[string]struct {
		opens, serves []error // results, in order
		want          error
	}{
		"it ends":                           {[]error{nil}, []error{nil}, nil},
		"it cannot be opened":               {[]error{lost}, nil, lost},
		"it fails":                          {[]error{nil}, []error{lost}, lost},
		"it begins again":                   {[]error{nil, nil}, []error{errAgain, nil}, nil},
		"it cannot begin again for a while": {[]error{nil, lost, lost, nil}, []error{errAgain, nil}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			next := func(of *[]error) error {
				if len(*of) == 0 {
					t.Fatal("one call too many")
				}
				err := (*of)[0]
				*of = (*of)[1:]
				return err
			}
			err := beginAgain(t.Context(), slog.New(slog.DiscardHandler), time.Millisecond, func() (func() error, error) {
				return func() error { return next(&tc.serves) }, next(&tc.opens)
			})
			if !errors.Is(err, tc.want) || tc.want == nil && err != nil || len(tc.opens)+len(tc.serves) > 0 {
				t.Errorf("got %v, want %v; %d openings and %d ends are left", err, tc.want, len(tc.opens), len(tc.serves))
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	first := true
	err := beginAgain(ctx, slog.New(slog.DiscardHandler), time.Hour, func() (func() error, error) {
		if first {
			first = false
			return func() error { return errAgain }, nil
		}
		time.AfterFunc(time.Millisecond, cancel)
		return nil, lost
	})
	if err != nil {
		t.Errorf("an operator stops it while it cannot begin again: %v", err)
	}
}
