package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrVersion means that a message has an unsupported version of the protocol.
var ErrVersion = errors.New("node protocol")

// Bounds of messages.
const (
	maxWithin = time.Hour // of an order
	maxName   = 253       // bytes of a node's or replica's name
	maxID     = 64        // bytes of an id
)

// thisVersion begins the messages that this release sends.
var thisVersion = fmt.Appendf(nil, `{"v":%d,`, Version)

// open decodes a message's version first, because only that is the same in all versions. Messages
// of this release begin with it, so they are decoded once.
func open(b []byte, into any) error {
	if bytes.HasPrefix(b, thisVersion) {
		if err := json.Unmarshal(b, into); err != nil {
			return fmt.Errorf("%d bytes, want a JSON object: %w", len(b), err)
		}
		return nil
	}
	var v struct{ V int }
	if err := json.Unmarshal(b, &v); err != nil {
		return fmt.Errorf("%d bytes, want a JSON object: %w", len(b), err)
	}
	if v.V != Version {
		return fmt.Errorf("%w: version %d, want %d: run the same release of stagecoach everywhere", ErrVersion, v.V, Version)
	}
	return json.Unmarshal(b, into)
}

// DecodeInventory decodes an announcement. It ignores unknown fields, and refuses numbers that
// cannot be true.
func DecodeInventory(b []byte) (Inventory, error) {
	inv, err := decodeAnnouncer(b)
	if err == nil {
		err = inv.check()
	}
	if err != nil {
		return Inventory{}, fmt.Errorf("inventory: %w", err)
	}
	return inv, nil
}

// decodeAnnouncer decodes an announcement of which only the identity is used.
func decodeAnnouncer(b []byte) (Inventory, error) {
	if len(b) > maxInventory {
		return Inventory{}, fmt.Errorf("%d bytes, want at most %d", len(b), maxInventory)
	}
	var inv Inventory
	if err := open(b, &inv); err != nil {
		return Inventory{}, err
	}
	if err := errors.Join(isName("name", inv.Name), isID("id", inv.ID)); err != nil {
		return Inventory{}, err
	}
	return inv, nil
}

// DecodeOrder decodes an order. It refuses unknown fields, because an order must not be carried out
// in part.
func DecodeOrder(b []byte) (Order, error) {
	var o Order
	err := open(b, &o)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		o = Order{}
		if err = d.Decode(&o); err != nil {
			err = fmt.Errorf("%w; run the same release of stagecoach everywhere", err)
		}
	}
	if err == nil {
		err = o.validate()
	}
	if err != nil {
		return Order{}, fmt.Errorf("order: %w", err)
	}
	return o, nil
}

func (o Order) validate() error {
	errs := []error{isID("id", o.ID)}
	if o.Within <= 0 || o.Within > maxWithin {
		errs = append(errs, fmt.Errorf("within: %v, want more than 0 and at most %v", o.Within, maxWithin))
	}
	need := func(field string, there bool) {
		if !there {
			errs = append(errs, fmt.Errorf("%s: missing in an order to %s", field, o.Kind))
		}
	}
	switch o.Kind {
	case OrderWho, OrderEvents, OrderRefuse, OrderComplain, OrderImages:
	case OrderStart:
		errs = append(errs, isName("replica", o.Replica), o.Spec.validate())
	case OrderStop, OrderSetCPU:
		errs = append(errs, isName("replica", o.Replica))
	case OrderLoad:
		errs = append(errs, o.Spec.validate())
	case OrderWarm:
		for _, w := range o.Wanted {
			errs = append(errs, w.Spec.validate())
		}
	case OrderEvict:
		need("function or digest", o.Function != "" || o.Digest != "")
	case OrderInvalidate, OrderForget:
		need("function", o.Function != "")
	case OrderCancel:
		errs = append(errs, isID("target", o.Target))
	default:
		errs = append(errs, fmt.Errorf("kind: %q is unknown to this release", o.Kind))
	}
	if o.Kind != OrderWho {
		errs = append(errs, isID("to", o.To))
	}
	if o.CPUMilli < 0 {
		errs = append(errs, fmt.Errorf("cpuMilli: %d, want 0 or more", o.CPUMilli))
	}
	return errors.Join(errs...)
}

// DecodeAnswer reads an answer to an order.
func DecodeAnswer(b []byte) (Answer, error) {
	var a Answer
	err := open(b, &a)
	if err == nil {
		err = isID("id", a.ID)
	}
	if err != nil {
		return Answer{}, fmt.Errorf("answer: %w", err)
	}
	return a, nil
}

// DecodeEvent reads an event.
func DecodeEvent(b []byte) (Event, error) {
	var e Event
	err := open(b, &e)
	if err == nil {
		err = isID("id", e.ID)
	}
	if err == nil && e.Number == 0 {
		err = errors.New("number: 0, want 1 or more")
	}
	if err != nil {
		return Event{}, fmt.Errorf("event: %w", err)
	}
	return e, nil
}

// CheckName returns why a text can be no node's name, or nil.
func CheckName(name string) error { return isName("node", name) }

func isName(field, s string) error {
	if s == "" || len(s) > maxName || strings.ContainsAny(s, " \t\r\n/") {
		return fmt.Errorf("%s: %q, want a name without spaces and slashes", field, s)
	}
	return nil
}

func isID(field, s string) error {
	if s == "" || len(s) > maxID {
		return fmt.Errorf("%s: %q, want 1 to %d bytes", field, s, maxID)
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') {
			return fmt.Errorf("%s: %q, want letters and digits", field, s)
		}
	}
	return nil
}
