package admin

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

const (
	deadLimit    = 100  // letters per page, unless the request says otherwise
	maxDeadLimit = 1000 // letters per page at most
)

// deadAPI serves dead letters:
//
//	GET    /system/dead[?function=&namespace=&limit=&after=]
//	GET    /system/dead/ID[?body=1]
//	POST   /system/dead/ID/redrive, POST /system/dead/redrive?function=
//	DELETE /system/dead/ID, DELETE /system/dead?function=
type deadAPI struct{ journal Journal }

func serveDead(j Journal) http.Handler {
	d := deadAPI{j}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /system/dead", d.list)
	mux.HandleFunc("GET /system/dead/{id}", d.show)
	mux.HandleFunc("POST /system/dead/{id}/redrive", d.one(func(r *http.Request, id string) error { return j.Redrive(r.Context(), id) }))
	mux.HandleFunc("DELETE /system/dead/{id}", d.one(func(_ *http.Request, id string) error { return j.DropDead(id) }))
	mux.HandleFunc("POST /system/dead/redrive", d.all(func(r *http.Request, id string) error { return j.Redrive(r.Context(), id) }))
	mux.HandleFunc("DELETE /system/dead", d.all(func(_ *http.Request, id string) error { return j.DropDead(id) }))
	return mux
}

// function returns the key that ?function= and ?namespace= name. asked is false without ?function=.
func (d deadAPI) function(r *http.Request) (key pipeline.Key, asked bool) {
	q := r.URL.Query()
	name := q.Get("function")
	return pipeline.Named(name, q.Get("namespace")), name != ""
}

// wanted returns which functions a request is about; nil: all.
func (d deadAPI) wanted(r *http.Request) func(function string) bool {
	if key, asked := d.function(r); asked {
		return func(function string) bool { return pipeline.ParseKey(function) == key }
	}
	if ns := r.URL.Query().Get("namespace"); ns != "" {
		return func(function string) bool { return pipeline.ParseKey(function).Namespace == ns }
	}
	return nil
}

func (d deadAPI) list(w http.ResponseWriter, r *http.Request) {
	limit := deadLimit
	if v := r.URL.Query().Get("limit"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > maxDeadLimit {
			d.fail(w, http.StatusBadRequest, fmt.Errorf("limit: got %.20q, want 1 to %d", v, maxDeadLimit))
			return
		}
		limit = n
	}
	letters, more, err := d.journal.Dead(d.wanted(r), r.URL.Query().Get("after"), limit)
	if err != nil {
		d.fail(w, 0, err)
		return
	}
	page := schema.DeadPage{Letters: make([]schema.DeadLetter, len(letters))}
	for i, l := range letters {
		page.Letters[i] = showLetter(l)
	}
	if more {
		page.Next = letters[len(letters)-1].ID
	}
	answerJSON(w, page)
}

func showLetter(l queue.DeadLetter) schema.DeadLetter {
	key := pipeline.ParseKey(l.Function)
	return schema.DeadLetter{
		ID: l.ID, Function: key.Name, Namespace: key.Namespace, Kind: l.Kind.String(), Cause: l.Cause, Dropped: l.Dropped, Attempts: l.Attempts,
		Accepted: l.Accepted.UTC(), Died: l.Died.UTC(), Bytes: l.Size,
	}
}

func (d deadAPI) show(w http.ResponseWriter, r *http.Request) {
	l, data, err := d.journal.DeadLetter(r.Context(), r.PathValue("id"))
	if err != nil {
		d.fail(w, 0, err)
		return
	}
	out, contentType, body, err := openLetter(l, data)
	if err != nil {
		out.Cause += fmt.Sprintf(" (its content cannot be read: %v)", err)
	}
	if r.URL.Query().Get("body") == "" || err != nil {
		answerJSON(w, out)
		return
	}
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Disposition", "attachment") // browsers must not show content of strangers
	_, _ = w.Write(body)                       // fails only when the client is gone
}

// openLetter reads the content of a letter.
func openLetter(l queue.DeadLetter, data []byte) (out schema.DeadLetter, contentType string, body []byte, err error) {
	out = showLetter(l)
	if l.Kind == queue.Callback {
		var n gateway.Notice
		if err := n.UnmarshalBinary(data); err != nil {
			return out, "", nil, err
		}
		out.CallID, out.Callback, out.Status = n.CallID, gateway.SafeURL(n.URL), n.Status
		return out, n.ContentType, n.Body, nil
	}
	var e gateway.Entry
	if err := e.UnmarshalBinary(data); err != nil {
		return out, "", nil, err
	}
	out.CallID, out.Callback, out.Header = e.CallID, gateway.SafeURL(e.Callback), map[string][]string{}
	line := map[string]string{}
	for _, h := range e.Request.Header {
		switch h.Name {
		case "Http-Method", "Http-Path", "Http-Query":
			line[h.Name] = h.Value
		case task.HeaderDirect:
		default:
			if !secretHeader(h.Name) {
				out.Header[h.Name] = append(out.Header[h.Name], h.Value)
			}
		}
	}
	out.Request = line["Http-Method"] + " " + line["Http-Path"]
	if q := line["Http-Query"]; q != "" {
		out.Request += "?" + q
	}
	if out.Function == "" { // stored by an earlier version
		key := pipeline.ParseKey(e.Request.Target)
		out.Function, out.Namespace = key.Name, key.Namespace
	}
	contentType, body, err = tensor.ToHTTP(tensor.Input{{Items: e.Request.Input}})
	return out, contentType, body, err
}

// secretHeader reports whether a header may carry credentials.
func secretHeader(name string) bool {
	name = strings.ToLower(name)
	return name == "cookie" || slices.ContainsFunc([]string{"authorization", "token", "secret", "password", "api-key", "apikey", "signature", "hmac"}, func(part string) bool {
		return strings.Contains(name, part)
	})
}

// one serves a change of the letter that the path names.
func (d deadAPI) one(f func(r *http.Request, id string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := f(r, r.PathValue("id")); err != nil {
			d.fail(w, 0, err)
			return
		}
		answerJSON(w, schema.DeadDone{Letters: 1})
	}
}

// all serves a change of all letters that a function has now.
func (d deadAPI) all(f func(r *http.Request, id string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if _, asked := d.function(r); !asked {
			d.fail(w, http.StatusBadRequest, errors.New(`function: got "", want ?function= with the name of one`))
			return
		}
		letters, _, err := d.journal.Dead(d.wanted(r), "", 1<<30) // the journal bounds its letters
		var done schema.DeadDone
		for _, l := range letters {
			if err == nil {
				err = f(r, l.ID)
			}
			if err == nil {
				done.Letters++
			} else if errors.Is(err, queue.ErrNoLetter) { // another request has changed it
				err = nil
			}
		}
		if err != nil {
			d.fail(w, 0, fmt.Errorf("after %d of %d: %w", done.Letters, len(letters), err))
			return
		}
		answerJSON(w, done)
	}
}

// fail answers with an error. It chooses the status by the error if status is 0.
func (d deadAPI) fail(w http.ResponseWriter, status int, err error) {
	if status == 0 {
		status = http.StatusServiceUnavailable
		if errors.Is(err, queue.ErrNoLetter) {
			status = http.StatusNotFound
		} else {
			w.Header().Set("X-OpenFaaS-Internal", "stagecoach")
			w.Header().Set("Retry-After", "5")
		}
	}
	http.Error(w, err.Error(), status)
}
