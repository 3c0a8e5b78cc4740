package provider

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/openfaas/faas-provider/logs"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// LogQuery selects lines of a function's output.
type LogQuery struct {
	Key     pipeline.Key // of the function
	Replica string       // empty: all replicas
	Since   time.Time    // zero: all lines that are kept
	Tail    int          // only the latest Tail of the present lines; 0 or less: all
	Follow  bool         // continue with new lines
}

// LogLine is a line that a replica has printed.
type LogLine struct {
	At      time.Time
	Replica string
	Text    string
}

// Logs holds what replicas have printed.
type Logs interface {
	// Read opens a reader. The caller closes it.
	Read(q LogQuery) LogReader
}

// LogReader reads lines.
type LogReader interface {
	// Read returns the next lines. lost is how many lines were dropped before them because the
	// reader was slow. If the query follows, Read waits for new lines. It returns io.EOF at the
	// end.
	Read(ctx context.Context) (lines []LogLine, lost uint64, err error)
	Close()
}

// logPatience is how long a client may take to read a piece of the logs.
const logPatience = 30 * time.Second

// logs streams the output of a function's replicas, one JSON object per line, until the client
// leaves or there are no more lines.
func (p *Provider) logs(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	q, err := logQuery(query)
	var d Deployed
	if err == nil {
		d, err = p.find(query.Get("name"), query.Get("namespace"), r)
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	q.Key = d.Key
	reader := p.Logs.Read(q)
	defer reader.Close()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	c, out := http.NewResponseController(w), json.NewEncoder(w)
	out.SetEscapeHTML(false)
	_ = c.Flush() // so that a client that follows gets the header at once
	message := logs.Message{Name: d.Declared.Name, Namespace: d.Declared.Namespace}
	for {
		lines, lost, err := reader.Read(r.Context())
		if err != nil {
			if !errors.Is(err, io.EOF) && r.Context().Err() == nil {
				p.Log.Error("logs", "function", d.Key, "error", err)
			}
			return
		}
		_ = c.SetWriteDeadline(time.Now().Add(logPatience)) // a test's recorder has no deadline
		if lost > 0 {
			message.Timestamp, message.Instance, message.Text = time.Now().UTC(), "", fmt.Sprintf("stagecoach: %d lines are lost, because they came faster than they were read", lost)
			_ = out.Encode(message) // the flush reports a broken connection
		}
		for _, l := range lines {
			message.Timestamp, message.Instance, message.Text = l.At, l.Replica, l.Text
			_ = out.Encode(message)
		}
		if err := c.Flush(); err != nil {
			return // the client is gone
		}
	}
}

// logQuery parses the query's parameters, except those that name the function.
func logQuery(query url.Values) (q LogQuery, err error) {
	q.Replica = query.Get("instance")
	bad := func(name, want string) {
		err = errors.Join(err, &pipeline.FieldError{Path: name, Got: quote(query.Get(name)), Want: want})
	}
	var e error
	if query.Get("name") == "" {
		bad("name", "a function's name")
	}
	if v := query.Get("tail"); v != "" {
		if q.Tail, e = strconv.Atoi(v); e != nil {
			bad("tail", "a number of lines, -1 for all")
		}
	}
	if v := query.Get("follow"); v != "" {
		if q.Follow, e = strconv.ParseBool(v); e != nil {
			bad("follow", "true or false, 1 or 0")
		}
	}
	if v := query.Get("since"); v != "" {
		if q.Since, e = time.Parse(time.RFC3339, v); e != nil {
			bad("since", "a time as RFC 3339 has it, such as 2026-01-02T15:04:05Z")
		}
	}
	return q, err
}
