package gateway

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Versions of an entry's binary form. The head was JSON in the first version.
const (
	entryVersionJSON = 1
	entryVersion     = 2
)

// entryHead is an entry without its input.
type entryHead struct {
	ID          string        `json:"id"`
	Target      string        `json:"target"`
	Traceparent string        `json:"traceparent,omitempty"`
	Header      []task.Header `json:"header"`
	CallID      string        `json:"callId"`
	Name        string        `json:"name"`
	Timeout     time.Duration `json:"timeout"`
	Callback    string        `json:"callback,omitempty"`
	Inside      bool          `json:"inside,omitempty"`
	Accepted    time.Time     `json:"accepted"`

	Inference *tensor.Inference `json:"-"`
}

// MarshalBinary returns the form in which a journal stores e: the version, the length of the head,
// the head, and the input as package tensor encodes it.
func (e Entry) MarshalBinary() ([]byte, error) {
	r := &e.Request
	at, err := e.Accepted.MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("async request %q: %w", r.ID, err)
	}
	h := make([]byte, 0, 512)
	for _, s := range []string{r.ID, r.Target, r.Traceparent, e.CallID, e.Name, e.Callback} {
		h = pack.String(h, s)
	}
	inside := uint64(0)
	if e.Inside {
		inside = 1
	}
	h = pack.Bytes(pack.Uint(pack.Int(h, int64(e.Timeout)), inside), at)
	h = pack.Uint(h, uint64(len(r.Header)))
	for _, f := range r.Header {
		h = pack.String(pack.String(h, f.Name), f.Value)
	}
	var inference []byte // as JSON; empty: none
	if e.Inference != nil {
		if inference, err = json.Marshal(e.Inference); err != nil {
			return nil, fmt.Errorf("async request %q: %w", r.ID, err)
		}
	}
	h = pack.Bytes(h, inference)
	size := len(h) + 64
	for i := range r.Input {
		size += r.Input[i].Size() + 64
	}
	b := make([]byte, 0, size)
	return tensor.AppendActivation(pack.Bytes(append(b, entryVersion), h), r.Input), nil
}

// UnmarshalBinary decodes what any version of [Entry.MarshalBinary] wrote. The entry keeps
// references to b.
func (e *Entry) UnmarshalBinary(b []byte) error {
	version := byte(entryVersion)
	if len(b) > 0 && b[0] == entryVersionJSON {
		version = entryVersionJSON
	}
	head, rest, err := splitHead(b, version)
	if err != nil {
		return fmt.Errorf("async request: %w", err)
	}
	var h entryHead
	if version == entryVersionJSON {
		err = json.Unmarshal(head, &h)
	} else {
		err = h.unpack(head)
	}
	if err != nil {
		return fmt.Errorf("async request: head: %w", err)
	}
	input, err := tensor.DecodeActivation(rest)
	if err != nil {
		return fmt.Errorf("async request %q: input: %w", h.ID, err)
	}
	*e = Entry{
		Request: task.Request{ID: h.ID, Target: h.Target, Traceparent: h.Traceparent, Header: h.Header, Input: input},
		CallID:  h.CallID, Name: h.Name, Timeout: h.Timeout, Callback: h.Callback, Inside: h.Inside, Accepted: h.Accepted,
		Inference: h.Inference,
	}
	return nil
}

// unpack decodes a head of the current version.
func (h *entryHead) unpack(b []byte) error {
	r := pack.NewReader(b)
	for _, s := range []*string{&h.ID, &h.Target, &h.Traceparent, &h.CallID, &h.Name, &h.Callback} {
		*s = r.String()
	}
	h.Timeout, h.Inside = time.Duration(r.Int()), r.Uint() != 0
	if at := r.Bytes(); r.Err() == nil {
		if err := h.Accepted.UnmarshalBinary(at); err != nil {
			return err
		}
	}
	if n := r.Count(2); n > 0 {
		h.Header = make([]task.Header, n)
		for i := range h.Header {
			h.Header[i] = task.Header{Name: r.String(), Value: r.String()}
		}
	}
	if inference := r.Bytes(); len(inference) > 0 && r.Err() == nil {
		if err := json.Unmarshal(inference, &h.Inference); err != nil {
			return err
		}
	}
	return r.End()
}
