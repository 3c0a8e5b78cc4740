package warden

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Version is that of the messages between a manager and a warden in another process.
const Version = 1

// The messages are JSON, one each a packet of a SOCK_SEQPACKET socket, with descriptors beside it.
const (
	maxMessage = 128 << 10 // bytes
	maxRights  = 253       // descriptors with one message; the kernel's bound
)

// What a message is about. A manager asks; what it asks has an id, which the answer repeats. The first is hello.
const (
	opHello   = "hello"
	opAttach  = "attach" // answered by a kept message for each entry, then the answer
	opRelease = "release"
	opStart   = "start"
	opSignal  = "signal"
	opPut     = "put"
	opDrop    = "drop"

	opAnswer = "answer"
	opKept   = "kept"
	opExit   = "exit" // told when it happens, between attach and release
)

// message is any of them.
type message struct {
	Version int    `json:"version"`
	Op      string `json:"op"`
	ID      uint64 `json:"id,omitempty"`

	Name    string           `json:"name,omitempty"`
	Meta    []byte           `json:"meta,omitempty"`
	Signal  int              `json:"signal,omitempty"`
	Command *sandbox.Command `json:"command,omitempty"` // without descriptors
	Fields  map[string][]int `json:"fields,omitempty"`  // which descriptors beside the message belong to which field of it; -1: nil
	Keep    int              `json:"keep,omitempty"`    // how many of them, the last ones, are to be kept
	Idle    bool             `json:"idle,omitempty"`

	PID    int    `json:"pid,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
	Status uint32 `json:"status,omitempty"`
	Lost   int64  `json:"lost,omitempty"`
	Error  string `json:"error,omitempty"`
	Code   string `json:"code,omitempty"` // of an error that callers tell apart

	files []*os.File // the descriptors beside it
}

// codes are the errors that are the same on the other side.
var codes = map[string]error{"closed": ErrClosed, "taken": ErrTaken, "unknown": ErrUnknown, "lost": ErrLost}

func (m *message) fail(err error) {
	m.Error = err.Error()
	for code, e := range codes {
		if errors.Is(err, e) {
			m.Code = code
		}
	}
}

// fault is an error of the other side.
type fault struct {
	text string
	is   error // one of codes; nil: none
}

func (f fault) Error() string { return f.text }
func (f fault) Unwrap() error { return f.is }

func (m *message) err() error {
	if m.Error == "" {
		return nil
	}
	return fault{m.Error, codes[m.Code]}
}

var (
	fileType  = reflect.TypeFor[*os.File]()
	filesType = reflect.TypeFor[[]*os.File]()
)

// setCommand puts a command into the message: its fields of type *os.File and []*os.File, whichever there are, become
// descriptors beside it.
func (m *message) setCommand(c sandbox.Command) {
	m.Command, m.Fields = &c, map[string][]int{}
	v := reflect.ValueOf(m.Command).Elem()
	for i := range v.NumField() {
		field := v.Field(i)
		var files []*os.File
		switch field.Type() {
		case fileType:
			if f, ok := field.Interface().(*os.File); ok && f != nil {
				files = []*os.File{f}
			}
		case filesType:
			files, _ = field.Interface().([]*os.File)
		default:
			continue
		}
		for _, f := range files {
			at := -1
			if f != nil {
				at = len(m.files)
				m.files = append(m.files, f)
			}
			m.Fields[v.Type().Field(i).Name] = append(m.Fields[v.Type().Field(i).Name], at)
		}
		field.SetZero()
	}
}

// command is the opposite of setCommand. The descriptors stay the message's.
func (m *message) command() (sandbox.Command, error) {
	if m.Command == nil {
		return sandbox.Command{}, errors.New("no command, want one")
	}
	c := *m.Command
	v := reflect.ValueOf(&c).Elem()
	for name, at := range m.Fields {
		var files []*os.File
		for _, i := range at {
			if i < -1 || i >= len(m.files) {
				return c, fmt.Errorf("command.%s: descriptor %d, want one of %d", name, i, len(m.files))
			}
			var f *os.File
			if i >= 0 {
				f = m.files[i]
			}
			files = append(files, f)
		}
		field := v.FieldByName(name)
		switch {
		case field.IsValid() && field.Type() == fileType && len(files) == 1:
			field.Set(reflect.ValueOf(files[0]))
		case field.IsValid() && field.Type() == filesType:
			field.Set(reflect.ValueOf(files))
		default:
			return c, fmt.Errorf("command.%s: %d descriptors, want a field for them: the other side is of another release", name, len(files))
		}
	}
	return c, nil
}

// kept returns the descriptors that are to be kept.
func (m *message) kept() ([]*os.File, error) {
	if m.Keep < 0 || m.Keep > len(m.files) {
		return nil, fmt.Errorf("keep: %d descriptors, want 0..%d", m.Keep, len(m.files))
	}
	return m.files[len(m.files)-m.Keep:], nil
}

// close closes the descriptors beside a message that was received.
func (m *message) close() {
	for _, f := range m.files {
		_ = f.Close() // nothing was written through it
	}
	m.files = nil
}

// wire sends and receives messages. One goroutine may receive, many may send.
type wire struct {
	conn    *net.UnixConn
	sending sync.Mutex
	buf     []byte
	rights  []byte
}

func newWire(conn *net.UnixConn) *wire {
	return &wire{conn: conn, buf: make([]byte, maxMessage+1), rights: make([]byte, unix.CmsgSpace(4*maxRights))}
}

// sendTimeout bounds how long the other side may not read.
const sendTimeout = 10 * time.Second

// send sends a message; an error that is not fatal for the connection is an errTooLarge.
func (w *wire) send(m message) error {
	w.sending.Lock()
	defer w.sending.Unlock()
	return w.sendLocked(m)
}

// errTooLarge says that a message was not sent.
var errTooLarge = errors.New("larger than a message may be")

func (w *wire) sendLocked(m message) error {
	m.Version = Version
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("%s %q: %w: %w", m.Op, m.Name, errTooLarge, err)
	}
	if len(b) > maxMessage || len(m.files) > maxRights {
		return fmt.Errorf("%s %q: %w: %d bytes and %d descriptors, want at most %d (its environment is most of it) and %d",
			m.Op, m.Name, errTooLarge, len(b), len(m.files), maxMessage, maxRights)
	}
	return w.write(b, m.files, nil)
}

// write sends the descriptors of files: they must not be closed meanwhile.
func (w *wire) write(b []byte, files []*os.File, fds []int) error {
	if len(files) > 0 {
		raw, err := files[0].SyscallConn() // its Fd would make it a blocking one
		if err != nil {
			return fmt.Errorf("%w: descriptor: %w", errTooLarge, err)
		}
		var sent error
		if err := raw.Control(func(fd uintptr) { sent = w.write(b, files[1:], append(fds, int(fd))) }); err != nil {
			return fmt.Errorf("%w: descriptor: %w", errTooLarge, err)
		}
		return sent
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_ = w.conn.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	_, _, err := w.conn.WriteMsgUnix(b, rights, nil)
	return err
}

// receive returns the next message, whose descriptors are the caller's.
func (w *wire) receive() (message, error) {
	n, oob, flags, _, err := w.conn.ReadMsgUnix(w.buf, w.rights)
	if err != nil {
		return message{}, err
	}
	var m message
	if m.files, err = received(w.rights[:oob]); err != nil {
		return message{}, err
	}
	switch {
	case n > maxMessage || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = fmt.Errorf("a message above %d bytes or %d descriptors, want less", maxMessage, maxRights)
	default:
		err = json.Unmarshal(w.buf[:n], &m)
	}
	if err != nil {
		m.close()
		return message{}, fmt.Errorf("warden: message: %w", err)
	}
	return m, nil
}

// received takes descriptors out of what came beside a message.
func received(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	all, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("warden: descriptors: %w", err)
	}
	var files []*os.File
	for _, c := range all {
		fds, err := syscall.ParseUnixRights(&c)
		if err != nil {
			continue // something else
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received")) // one that does not block is polled
		}
	}
	return files, nil
}
