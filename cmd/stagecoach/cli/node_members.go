package cli

import (
	"cmp"
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

// nodeTokens lists the join tokens.
func nodeTokens(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("node tokens", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	asJSON := console.JSONFlag(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	all := []schema.JoinTokenInfo{}
	if err := api.Get(ctx, "/system/nodes/tokens", &all); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(out).Encode(all)
	}
	t := console.NewTable(out)
	fmt.Fprintln(t, "ID\tNODE\tCREATED\tEXPIRES\tUSED")
	for _, one := range all {
		expires, used := "never", fmt.Sprint(one.Used)
		if !one.Expires.IsZero() {
			expires = one.Expires.Local().Format(time.DateTime)
		}
		if one.Uses > 0 {
			used += fmt.Sprintf(" of %d", one.Uses)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", one.ID, cmp.Or(one.Name, "any"), one.Created.Local().Format(time.DateTime), expires, used)
	}
	return t.Flush()
}

// nodeTokenRevoke makes a join token void.
func nodeTokenRevoke(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("node token revoke", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return fmt.Errorf("node token revoke: got %q, want one id; `stagecoach node tokens` lists them", rest)
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	if err := api.Send(ctx, "node token revoke", http.MethodDelete, "/system/nodes/tokens/"+url.PathEscape(rest[0]), struct{}{}); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: void; nodes that have joined with it stay\n", rest[0])
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
