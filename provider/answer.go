package provider

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// statusError is an error with an HTTP status.
type statusError struct {
	status int
	error
}

func (e statusError) Unwrap() error { return e.error }

func refuse(status int, err error) error { return statusError{status, err} }

// status returns the HTTP status for an error. No other code does.
func status(err error) int {
	var s statusError
	var field *pipeline.FieldError
	var tooLarge *http.MaxBytesError
	var other interface{ HTTPStatus() int }
	switch {
	case errors.As(err, &s):
		return s.status
	case errors.As(err, &other):
		return other.HTTPStatus()
	case errors.As(err, &tooLarge):
		return http.StatusRequestEntityTooLarge
	case errors.As(err, &field):
		return http.StatusBadRequest
	case disk.IsFull(err): // our own disk, so the registry is not to blame
		return http.StatusServiceUnavailable
	case errors.Is(err, ErrImages) && errors.Is(err, context.DeadlineExceeded):
		return http.StatusGatewayTimeout
	case errors.Is(err, ErrImages):
		return http.StatusBadGateway
	default: // the store or the cluster failed
		return http.StatusServiceUnavailable
	}
}

// problem is the JSON form of an error.
type problem struct {
	Error  string  `json:"error"`
	Fields []field `json:"fields,omitempty"`
}

// field describes a fault in one field of a request.
type field struct {
	Path string `json:"path"`
	Got  string `json:"got"`
	Want string `json:"want"`
}

// fail answers with an error: as text, which faas-cli prints, or as JSON if Accept asks for it.
func (p *Provider) fail(w http.ResponseWriter, r *http.Request, err error) {
	code := status(err)
	if code >= 500 {
		internal(w)
		if code == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", "1")
		}
		p.Log.Error("request failed", "method", r.Method, "path", r.URL.Path, "status", code, "error", err)
	}
	if !strings.Contains(r.Header.Get("Accept"), "application/json") {
		writeText(w, code, err.Error())
		return
	}
	body := problem{Error: err.Error()}
	for _, f := range fieldErrors(err) {
		body.Fields = append(body.Fields, field{f.Path, f.Got, f.Want})
	}
	writeJSON(w, code, body)
}

// fieldErrors returns the field errors in a tree of joined and wrapped errors, in order.
func fieldErrors(err error) []*pipeline.FieldError {
	switch e := err.(type) { //nolint:errorlint // errors.As would stop at the first one
	case nil:
		return nil
	case *pipeline.FieldError:
		return []*pipeline.FieldError{e}
	case interface{ Unwrap() []error }:
		var all []*pipeline.FieldError
		for _, one := range e.Unwrap() {
			all = append(all, fieldErrors(one)...)
		}
		return all
	default:
		return fieldErrors(errors.Unwrap(err))
	}
}

// internal marks an answer as the platform's own.
func internal(w http.ResponseWriter) { w.Header().Set("X-OpenFaaS-Internal", "stagecoach") }

func writeText(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text + "\n")) // fails only if the client is gone
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // our own types can be encoded; a write fails only if the client is gone
}
