package kube

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const (
	// followFor is how long the API server sends changes before the objects are listed again.
	followFor = 5 * time.Minute
	// followPage is how many objects a page of a list has at most.
	followPage = 500
	// maxChange bounds the metadata of an object in a change, in bytes.
	maxChange = 2 << 20
)

// Pauses after errors.
const (
	pauseLeast = time.Second
	pauseMost  = 30 * time.Second
)

// Accepted forms of answers that have the metadata of objects alone.
const (
	metadataList   = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	metadataObject = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
)

// Objects names objects of the core API.
type Objects struct {
	Resource  string // such as secrets
	Namespace string // empty: they belong to no namespace
	Selector  string // by labels; empty: all
}

// path returns the path of the objects, or of the one with a name.
func (o Objects) path(name string) string {
	path := "/api/v1/"
	if o.Namespace != "" {
		path += "namespaces/" + url.PathEscape(o.Namespace) + "/"
	}
	path += o.Resource
	if name != "" {
		path += "/" + url.PathEscape(name)
	}
	return path
}

func (o Objects) String() string {
	if o.Namespace == "" {
		return o.Resource
	}
	return o.Resource + " of namespace " + o.Namespace
}

// Follower gets objects and their changes. Calls come one at a time.
type Follower struct {
	// Listed gets all objects: at first, and again every few minutes.
	Listed func(ctx context.Context, all []Meta) error
	// Changed gets an object after a change. It is gone if it was deleted, or is not selected any
	// more.
	Changed func(ctx context.Context, m Meta, gone bool) error
	// Failed gets each error before a pause. Then the objects are listed again.
	Failed func(error)
}

// Follow lists objects and follows their changes until ctx ends. Only their metadata is read. The
// service account needs the verbs list and watch.
func (c *Client) Follow(ctx context.Context, of Objects, f Follower) {
	pause := c.pause
	for {
		begun := time.Now()
		listed, err := c.follow(ctx, of, f)
		if ctx.Err() != nil {
			return
		}
		if listed {
			pause = c.pause
		}
		switch {
		case err != nil:
			f.Failed(err)
		case time.Since(begun) > c.pause:
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, pauseMost)
	}
}

// follow lists objects once, and follows their changes until the API server ends the watch.
func (c *Client) follow(ctx context.Context, of Objects, f Follower) (listed bool, err error) {
	all, version, err := c.List(ctx, of)
	if err != nil {
		return false, err
	}
	if err := f.Listed(ctx, all); err != nil {
		return false, err
	}
	// The API server ends the watch earlier.
	watch, cancel := context.WithTimeout(ctx, followFor+time.Minute)
	defer cancel()
	q := url.Values{"watch": {"true"}, "resourceVersion": {version}, "timeoutSeconds": {strconv.Itoa(int(followFor.Seconds()))}}
	if of.Selector != "" {
		q.Set("labelSelector", of.Selector)
	}
	resp, err := c.send(watch, request{method: http.MethodGet, path: of.path(""), query: q, accept: metadataObject})
	if err == nil {
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(nil, maxChange)
		for err == nil && lines.Scan() {
			err = takeChange(ctx, lines.Bytes(), f)
		}
		if err == nil {
			err = lines.Err()
		}
	}
	if errors.Is(err, errTooOld) {
		return true, nil
	}
	if err != nil {
		err = fmt.Errorf("kube: watch %s: %w", of, err)
	}
	return true, err
}

// errTooOld means that the API server does not know any more what has changed since a version.
var errTooOld = errors.New("the version is too old")

// takeChange passes a line of a watch on.
func takeChange(ctx context.Context, line []byte, f Follower) error {
	var e struct {
		Type   string          `json:"type"`
		Object json.RawMessage `json:"object"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return err
	}
	if e.Type == "ERROR" {
		var s struct {
			Code int `json:"code"`
		}
		if json.Unmarshal(e.Object, &s) == nil && s.Code == http.StatusGone {
			return errTooOld
		}
		return refusal(s.Code, e.Object)
	}
	var o struct {
		Metadata Meta `json:"metadata"`
	}
	if err := json.Unmarshal(e.Object, &o); err != nil {
		return err
	}
	return f.Changed(ctx, o.Metadata, e.Type == "DELETED")
}

// List returns the metadata of objects, and the version of the list.
func (c *Client) List(ctx context.Context, of Objects) (all []Meta, version string, err error) {
	q := url.Values{"limit": {strconv.Itoa(followPage)}}
	if of.Selector != "" {
		q.Set("labelSelector", of.Selector)
	}
	for {
		b, err := c.do(ctx, request{method: http.MethodGet, path: of.path(""), query: q, accept: metadataList})
		var page struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []struct {
				Metadata Meta `json:"metadata"`
			} `json:"items"`
		}
		if err == nil {
			err = json.Unmarshal(b, &page)
		}
		if err != nil {
			return nil, "", fmt.Errorf("kube: list %s: %w", of, err)
		}
		for _, item := range page.Items {
			all = append(all, item.Metadata)
		}
		if page.Metadata.Continue == "" {
			return all, page.Metadata.ResourceVersion, nil
		}
		q.Set("continue", page.Metadata.Continue)
	}
}
