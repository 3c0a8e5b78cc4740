package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// runReplay decides again what `up --record` has recorded.
func runReplay(_ context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("replay", flag.ContinueOnError)
	asJSON := console.JSONFlag(fs)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return fmt.Errorf("replay: got %q, want one FILE, as `stagecoach up --record FILE` writes it", rest)
	}
	f, err := os.Open(rest[0])
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	defer f.Close()
	r, err := control.ReplayRecord(f)
	if err != nil {
		err = fmt.Errorf("replay %s: %w", rest[0], err)
	}
	if err == nil && r.Decisions+len(r.Unread) == 0 {
		return fmt.Errorf("replay %s: no decision in it, want lines as `stagecoach up --record FILE` writes them", rest[0])
	}
	if *asJSON {
		err = errors.Join(err, json.NewEncoder(out).Encode(r))
	} else {
		err = errors.Join(err, showReplay(r, out))
	}
	if err == nil && !r.Same() {
		err = fmt.Errorf("replay %s: %d fields of %d decisions are not the same, %d lines could not be read", rest[0], len(r.Diffs), r.Decisions, len(r.Unread))
	}
	return err
}

func showReplay(r control.Replay, out io.Writer) error {
	t := console.NewTable(out)
	if len(r.Diffs) > 0 {
		fmt.Fprintln(t, "LINE\tSNAPSHOT\tFUNCTION\tFIELD\tRECORDED\tGOT")
	}
	for _, d := range r.Diffs {
		fmt.Fprintf(t, "%d\t%d\t%s\t%s\t%s\t%s\n", d.Line, d.Rev, d.Function, d.Field, d.Recorded, d.Got)
	}
	for _, u := range r.Unread {
		fmt.Fprintf(t, "line %d not decided again: %s\n", u.Line, u.Why)
	}
	if r.Same() {
		fmt.Fprintf(t, "%d decisions made again: each as it was\n", r.Decisions)
	}
	return t.Flush()
}
