package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// nodeToken prints a new join token. Only the token goes to out, so that it can be piped.
func nodeToken(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("node token", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	asJSON := console.JSONFlag(fs)
	name := fs.String("name", "", "name of the only node that may join with it; default any")
	ttl := fs.Duration("ttl", time.Hour, "for which nodes may join with it; 0: for ever")
	uses := fs.Int("uses", 0, "nodes that may join with it; 0: any number")
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return fmt.Errorf("node token: got argument %q, want flags alone", rest[0])
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	b, err := json.Marshal(schema.JoinTokenOrder{Name: *name, TTL: schema.Duration(*ttl), Uses: *uses})
	if err != nil {
		return err
	}
	a, err := api.Do(ctx, http.MethodPost, "/system/nodes/tokens", "application/json", b)
	if err != nil {
		return err
	}
	var t schema.JoinToken
	if err := a.Decode("node token", &t); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(out).Encode(t)
	}
	if !t.Expires.IsZero() {
		fmt.Fprintf(os.Stderr, "a secret that lets nodes join cluster %s until %s:\n", t.Cluster, t.Expires.Local().Format(time.DateTime))
	} else {
		fmt.Fprintf(os.Stderr, "a secret that lets nodes join cluster %s for ever:\n", t.Cluster)
	}
	_, err = fmt.Fprintln(out, t.Token)
	return err
}

// nodeRevoke revokes the credentials of a node.
func nodeRevoke(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("node revoke", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return fmt.Errorf("node revoke: got %q, want one name", rest)
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	if err := api.Send(ctx, "node revoke", http.MethodPost, "/system/nodes/"+url.PathEscape(rest[0])+"/revoke", struct{}{}); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: revoked; to join again, it needs a new token (stagecoach node token --name %s)\n", rest[0], rest[0])
	return err
}
