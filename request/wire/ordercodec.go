package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
)

// AppendOrder appends o to b in the layout that its OrderKind documents.
func AppendOrder(b []byte, o Order) []byte {
	le := binary.LittleEndian
	b = append(b, byte(o.Kind), o.Version)
	switch o.Kind {
	case OrderFork, OrderList:
		b = le.AppendUint16(b, 0)
		b = le.AppendUint32(b, o.ID)
	case OrderBegin, OrderPark:
		b = le.AppendUint16(b, o.Threads)
		b = le.AppendUint32(b, 0)
		for _, kv := range o.Env {
			// Otherwise the rest would be a variable of its own.
			kv, _, _ = strings.Cut(kv, "\x00")
			b = append(append(b, kv...), 0)
		}
	case OrderKill:
		b = le.AppendUint16(b, o.Signal)
		b = le.AppendUint32(b, o.PID)
	case ZygoteReady:
		b = le.AppendUint16(b, o.Threads)
		b = le.AppendUint32(b, o.PID)
		b = le.AppendUint64(b, o.Nanos)
		b = le.AppendUint64(b, flag(o.Prepacked))
	case ChildParked:
		b = le.AppendUint16(b, 0)
		b = le.AppendUint32(b, 0)
		b = le.AppendUint64(b, o.Nanos)
	case ChildForked:
		b = le.AppendUint16(b, 0)
		b = le.AppendUint32(b, o.ID)
		b = le.AppendUint32(b, o.PID)
		b = le.AppendUint32(b, 0)
		b = le.AppendUint64(b, o.Nanos)
	case ChildExited:
		b = le.AppendUint16(b, 0)
		b = le.AppendUint32(b, o.PID)
		b = le.AppendUint32(b, o.Status)
	case ChildLives:
		b = le.AppendUint16(b, 0)
		b = le.AppendUint32(b, o.ID)
		b = le.AppendUint32(b, o.PID)
	case ZygoteError:
		b = le.AppendUint16(b, uint16(flag(o.Unforkable)))
		b = le.AppendUint32(b, o.ID)
		b = append(b, o.Text...)
	}
	return b
}

// size returns the length of the fixed part of a message; 0: unknown kind.
func (k OrderKind) size() int {
	switch k {
	case OrderFork, OrderBegin, OrderPark, OrderKill, OrderList, ZygoteError:
		return 8
	case ChildExited, ChildLives:
		return 12
	case ChildParked:
		return 16
	case ZygoteReady, ChildForked:
		return 24
	}
	return 0
}

func flag(on bool) uint64 {
	if on {
		return 1
	}
	return 0
}

// DecodeOrder decodes one message from a zygote's socket or a gate.
func DecodeOrder(b []byte) (Order, error) {
	if len(b) < 2 {
		return Order{}, fmt.Errorf("order of %d bytes, want a kind and a version", len(b))
	}
	o := Order{Kind: OrderKind(b[0]), Version: b[1]}
	size := o.Kind.size()
	switch {
	case size == 0:
		return Order{}, fmt.Errorf("order of kind %q, want one of F B P K L R C D X A E", b[0])
	case o.Version != OrderVersion:
		return Order{}, fmt.Errorf("order %c of version %d, want %d: %w", o.Kind, o.Version, OrderVersion, ErrVersion)
	case len(b) < size:
		return Order{}, fmt.Errorf("order %c of %d bytes, want at least %d", o.Kind, len(b), size)
	}
	le := binary.LittleEndian
	half, word := le.Uint16(b[2:]), le.Uint32(b[4:])
	switch o.Kind {
	case OrderFork, OrderList:
		o.ID = word
	case OrderBegin, OrderPark:
		o.Threads = half
		for rest := b[8:]; len(rest) > 0; {
			kv, after, ok := bytes.Cut(rest, []byte{0})
			if !ok {
				return Order{}, fmt.Errorf("order %c: environment ends in %q, want a NUL after each entry", o.Kind, rest)
			}
			o.Env, rest = append(o.Env, string(kv)), after
		}
		return o, nil
	case OrderKill:
		o.Signal, o.PID = half, word
	case ZygoteReady:
		o.Threads, o.PID, o.Nanos, o.Prepacked = half, word, le.Uint64(b[8:]), b[16]&1 != 0
	case ChildParked:
		o.Nanos = le.Uint64(b[8:])
	case ChildForked:
		o.ID, o.PID, o.Nanos = word, le.Uint32(b[8:]), le.Uint64(b[16:])
	case ChildExited:
		o.PID, o.Status = word, le.Uint32(b[8:])
	case ChildLives:
		o.ID, o.PID = word, le.Uint32(b[8:])
	case ZygoteError:
		o.Unforkable, o.ID, o.Text = half == 1, word, string(b[8:])
		return o, nil
	}
	if len(b) != size {
		return Order{}, fmt.Errorf("order %c of %d bytes, want %d", o.Kind, len(b), size)
	}
	return o, nil
}
