package provider

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// maxBody is the largest request to the management API in bytes.
const maxBody = 1 << 20

// namespaceOf returns the namespace of a request: from its body, else from its query, else the
// default.
func namespaceOf(body string, r *http.Request) string {
	return cmp.Or(body, r.URL.Query().Get("namespace"), pipeline.DefaultNamespace)
}

// readJSON decodes a request's body, which must be one JSON value.
func readJSON(w http.ResponseWriter, r *http.Request, v any) error {
	return readJSONOf(w, r, v, maxBody)
}

// readJSONOf is readJSON with a bound for the body in bytes.
func readJSONOf(w http.ResponseWriter, r *http.Request, v any, most int64) error {
	return readValue(json.NewDecoder(http.MaxBytesReader(w, r.Body, most)), v, most)
}

// readStrict is readJSON, but refuses fields that v does not have.
func readStrict(w http.ResponseWriter, r *http.Request, v any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	return readValue(d, v, maxBody)
}

// readValue decodes one JSON value of at most so many bytes.
func readValue(d *json.Decoder, v any, most int64) error {
	err := d.Decode(v)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more than one JSON value")
		}
	}
	var wrong *json.UnmarshalTypeError
	var tooLarge *http.MaxBytesError
	unknown := func() (name string) {
		text, _ := strings.CutPrefix(err.Error(), "json: unknown field ")
		name, _ = strconv.Unquote(text)
		return name
	}
	switch {
	case err == nil:
		return nil
	case unknown() != "":
		return &pipeline.FieldError{Path: strconv.Quote(unknown()), Got: "a field that is unknown", Want: "none of this name"}
	case errors.As(err, &tooLarge):
		return fmt.Errorf("body: more than %d bytes: %w", most, err)
	case errors.As(err, &wrong):
		return &pipeline.FieldError{Path: cmp.Or(wrong.Field, "body"), Got: "a JSON " + wrong.Value, Want: wrong.Type.String()}
	default:
		return &pipeline.FieldError{Path: "body", Got: err.Error(), Want: "one JSON object"}
	}
}
