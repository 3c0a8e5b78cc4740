package cli

import (
	"context"
	"flag"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Logs prints what the replicas of a function have printed.
func Logs(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("logs", flag.ContinueOnError)
	api := newAPIFlags(fs)
	follow := fs.Bool("f", false, "go on with what comes, until interrupted")
	fs.BoolVar(follow, "follow", false, "long for -f")
	tail := fs.Int("tail", -1, "at most so many lines of before; -1: all that are kept")
	since := fs.Duration("since", 0, "no older than this, such as 10m")
	asJSON := fs.Bool("json", false, "print each line as JSON, as the API gives it")
	name, err := console.OneName(fs, args)
	if err != nil {
		return err
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	q := url.Values{"name": {name}, "tail": {strconv.Itoa(*tail)}, "follow": {strconv.FormatBool(*follow)}}
	if api.namespace != "" {
		q.Set("namespace", api.namespace)
	}
	if *since > 0 {
		q.Set("since", time.Now().Add(-*since).Format(time.RFC3339))
	}
	resp, err := c.Stream(ctx, http.MethodGet, "/system/logs?"+q.Encode(), nil, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := client.Refused(resp, "logs "+name); err != nil {
		return err
	}
	if *asJSON {
		_, err = io.Copy(out, resp.Body)
	} else {
		err = client.PrintLogs(resp.Body, out)
	}
	if *follow && ctx.Err() != nil {
		return nil // that is how it ends
	}
	return err
}
