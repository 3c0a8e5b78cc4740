package upgradetest_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/previous"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// recorder keeps one message per kind: the one with the most fields.
type recorder struct {
	mu  sync.Mutex
	all map[string]previous.Message
}

// recordedKinds fits the subjects of recorded messages.
var recordedKinds = regexp.MustCompile(`^(\$KV\.functions\..+|\$KV\.[a-z]+|stagecoach\.v1\.node\.[^.]+\.(?:inventory|order|event|answer)|journal|dead|task|call)\b`)

// nodeInSubject is a node's name in a subject.
var nodeInSubject = regexp.MustCompile(`(node\.)[^.]+`)

func (r *recorder) take(subject string, header map[string][]string, data []byte) {
	kind := nodeInSubject.ReplaceAllString(recordedKinds.FindString(subject), "${1}")
	if kind == "" || len(data) == 0 {
		return
	}
	one := previous.Message{Subject: subject, Header: header}
	kind += strings.Join(slices.Sorted(maps.Keys(header)), "")
	if utf8.Valid(data) && !bytes.ContainsRune(data, 0) {
		one.Text = string(data)
		var is struct {
			Kind string
			Done bool
		}
		if json.Unmarshal(data, &is) == nil {
			kind += fmt.Sprintf(" %s %v", is.Kind, is.Done)
		}
	} else {
		one.Bytes = data
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if before, ok := r.all[kind]; !ok || shape(data) > shape(before.Data()) {
		r.all[kind] = one
	}
}

// shape counts the different fields of a JSON document.
func shape(b []byte) int {
	var doc any
	if json.Unmarshal(b, &doc) != nil {
		return 0
	}
	paths := map[string]bool{}
	fields("", doc, paths)
	return len(paths)
}

func fields(path string, v any, into map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		for name, v := range v {
			into[path+"."+name] = true
			fields(path+"."+name, v, into)
		}
	case []any:
		for _, v := range v {
			fields(path, v, into)
		}
	}
}

// TestRecord records messages and records of the previous version, for package previous.
func TestRecord(t *testing.T) {
	if os.Getenv("UPGRADE_RECORD") != "true" {
		t.Skip("only make test-upgrade RECORD=1 records the messages of the previous version")
	}
	c := startOutside(t, programs(t).old.path)
	r := &recorder{all: map[string]previous.Message{}}
	flush := natstest.Hear(t, c.nats, r.take)
	c.deploy()
	c.share()
	s := c.standby()
	for _, k := range kinds {
		if status, got, err := s.at(k.path, "hello"); err != nil || status != http.StatusOK {
			t.Errorf("%s: status %d, %v: %s", k.path, status, err, got)
		}
	}
	s.must(http.MethodPost, "/system/cache/warm", nil, map[string]string{"function": "asleep"})
	if status, got, err := s.at("/async-function/second", "hello", "X-Callback-Url", "http://127.0.0.1:1/"); err != nil || status != http.StatusAccepted {
		t.Errorf("async request: status %d, %v: %s", status, err, got)
	}
	s.must(http.MethodPost, "/system/scale-function/plain", nil, map[string]any{"serviceName": "plain", "replicas": 3})
	s.must(http.MethodPost, "/system/nodes/left/drain", nil, map[string]any{})
	s.must(http.MethodDelete, "/system/functions", nil, map[string]string{"functionName": "echo"})
	proctest.Until(t, "an idle function to sleep", func() bool {
		time.Sleep(100 * time.Millisecond)
		status, err := s.api().Status(t.Context(), "asleep")
		return err == nil && status.AvailableReplicas == 0
	})
	c.leader().stop() // stores demand
	flush()
	r.mu.Lock()
	defer r.mu.Unlock()
	var b bytes.Buffer
	to := json.NewEncoder(&b)
	to.SetEscapeHTML(false)
	for _, kind := range slices.Sorted(maps.Keys(r.all)) {
		if err := to.Encode(r.all[kind]); err != nil {
			t.Fatal(err)
		}
	}
	//nolint:gosec // it is committed
	if err := os.WriteFile("../previous/testdata/messages.jsonl", b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Logf("recorded %s", strings.Join(slices.Sorted(maps.Keys(r.all)), ", "))
}
