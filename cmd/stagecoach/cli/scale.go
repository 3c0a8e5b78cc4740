package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// Scale sets the number of a function's replicas for now.
func Scale(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("scale", flag.ContinueOnError)
	api := newAPIFlags(fs)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 2 {
		return fmt.Errorf("scale: got %q, want NAME REPLICAS", rest)
	}
	n, err := strconv.ParseUint(rest[1], 10, 31)
	if err != nil {
		return fmt.Errorf("scale: %q, want a number of replicas", rest[1])
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	body := struct {
		Name      string `json:"serviceName"`
		Replicas  uint64 `json:"replicas"`
		Namespace string `json:"namespace,omitempty"`
	}{rest[0], n, api.namespace}
	if err := c.Send(ctx, "scale "+rest[0], http.MethodPost, "/system/scale-function/"+url.PathEscape(rest[0])+api.query(), body); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %d replicas wanted\n", rest[0], n)
	return err
}
