package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// callPoll is the time between two requests of `stagecoach call --wait`.
const callPoll = 500 * time.Millisecond

// Call shows the state and the result of an async call.
func Call(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("call", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	asJSON := fs.Bool("json", false, "print JSON, as the API gives it")
	body := fs.Bool("body", false, "print only the body of the result")
	wait := fs.Bool("wait", false, "return when the call has ended; the exit status is 1 if it is dead")
	id, err := console.OneName(fs, args)
	if err != nil {
		return err
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	path := "/system/async/" + url.PathEscape(id)
	var c schema.Call
	for {
		c = schema.Call{}
		if err := api.Get(ctx, path, &c); err != nil {
			return err
		}
		if !*wait || c.State == schema.CallDone || c.State == schema.CallDead {
			break
		}
		pause := time.NewTimer(callPoll)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		}
	}
	switch {
	case *body:
		a, err := api.Do(ctx, http.MethodGet, path+"?body=1", "", nil)
		if err == nil && a.Status != http.StatusOK {
			err = a.Unexpected("call " + id)
		}
		if err != nil {
			return err
		}
		if _, err := out.Write(a.Body); err != nil {
			return err
		}
	case *asJSON:
		if err := json.NewEncoder(out).Encode(c); err != nil {
			return err
		}
	default:
		if err := describeCall(c, out); err != nil {
			return err
		}
	}
	if *wait && c.State == schema.CallDead {
		return fmt.Errorf("call %s: it is dead: %s", id, console.Harmless(c.Cause))
	}
	return nil
}

func describeCall(c schema.Call, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintf(t, "Call:\t%s\nFunction:\t%s.%s\nState:\t%s\n", c.CallID, c.Function, c.Namespace, stateText(c))
	for _, s := range c.Stages {
		fmt.Fprintf(t, "Stage:\t%s, %d of %d calls done%s%s\n", s.Stage, s.Done, s.Calls, attemptText(", attempt %d", s.Attempt), variantText(s.Variants))
	}
	fmt.Fprintf(t, "Accepted:\t%s\n", c.Accepted.Format(time.RFC3339))
	if c.Cause != "" {
		fmt.Fprintf(t, "Cause:\t%s\n", strings.Join(strings.Fields(c.Cause), " "))
	}
	if c.Callback != "" {
		fmt.Fprintf(t, "Callback:\t%s\n", c.Callback)
	}
	if r := c.Result; r != nil {
		fmt.Fprintf(t, "Result:\tstatus %d after %.3f s%s\n", r.Status, r.Seconds, map[bool]string{true: "; --body prints it"}[r.Kept])
	}
	if r := c.Result; r != nil && r.Dropped != "" {
		fmt.Fprintf(t, "Dropped:\t%s\n", r.Dropped)
	}
	if c.Letter != "" {
		fmt.Fprintf(t, "Letter:\t%s (stagecoach dead show, redrive or drop)\n", c.Letter)
	}
	return t.Flush()
}

// variantText names the functions that have answered calls of a stage.
func variantText(variants []string) string {
	if len(variants) == 0 {
		return ""
	}
	return ", by " + strings.Join(variants, ", ")
}

// stateText describes the state of a call.
func stateText(c schema.Call) string {
	next := ""
	if c.Next != nil {
		next = " at " + c.Next.Format(time.RFC3339)
	}
	switch c.State {
	case schema.CallAccepted:
		return "accepted, waits for its first run"
	case schema.CallRunning:
		return "running" + attemptText(", attempt %d", c.Attempt)
	case schema.CallRetrying:
		return fmt.Sprintf("retrying, attempt %d%s", c.Attempt+1, next)
	case schema.CallTelling:
		if next != "" {
			return fmt.Sprintf("telling its result, attempt %d%s", c.Attempt+1, next)
		}
		return "telling its result" + attemptText(", attempt %d", c.Attempt)
	}
	return c.State
}

// attemptText formats the number of attempts, or returns an empty string if there was none.
func attemptText(format string, n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(format, n)
}
