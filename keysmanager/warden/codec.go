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

// Version is the version of the messages between a manager and a warden in another process.
const Version = 1

// The messages are JSON. Each is one packet of a SOCK_SEQPACKET socket, with descriptors beside it.
const (
	maxMessage = 128 << 10 // bytes
	maxRights  = 253       // descriptors per message; the kernel's limit
)

// The operations of messages. A manager sends requests with an id, and the answer repeats the id.
// The first request is hello.
const (
	opHello   = "hello"
	opAttach  = "attach" // the warden sends a kept message for each entry, then the answer
	opRelease = "release"
	opStart   = "start"
	opSignal  = "signal"
	opPut     = "put"
	opDrop    = "drop"
	opCancel  = "cancel" // ends a start; it has no answer of its own

	opAnswer = "answer"
	opKept   = "kept"
	opExit   = "exit" // sent when a process ends, between attach and release
)

// message is a message of any operation.
type message struct {
	Version int    `json:"version"`
	Op      string `json:"op"`
	ID      uint64 `json:"id,omitempty"`

	Name    string           `json:"name,omitempty"`
	Meta    []byte           `json:"meta,omitempty"`
	Signal  int              `json:"signal,omitempty"`
	Command *sandbox.Command `json:"command,omitempty"` // without descriptors
	// Fields says which field of the command each descriptor beside the message belongs to; -1 stands
	// for nil.
	Fields map[string][]int `json:"fields,omitempty"`
	// Keep is the number of descriptors, counted from the last, that are kept.
	Keep int  `json:"keep,omitempty"`
	Idle bool `json:"idle,omitempty"`

	Of uint64 `json:"of,omitempty"` // the id of the start that is canceled; Error says why

	PID    int    `json:"pid,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
	Status uint32 `json:"status,omitempty"`
	Lost   int64  `json:"lost,omitempty"`
	Error  string `json:"error,omitempty"`
	Code   string `json:"code,omitempty"` // of an error that callers distinguish
	// Runs is, in the answer to hello, Server.Runs.
	Runs string `json:"runs,omitempty"`

	files []*os.File // the descriptors beside it
}

// codes are the errors that stay the same on the other side.
var codes = map[string]error{"closed": ErrClosed, "taken": ErrTaken, "unknown": ErrUnknown, "lost": ErrLost}

func (m *message) fail(err error) {
	m.Error = err.Error()
	for code, e := range codes {
		if errors.Is(err, e) {
			m.Code = code
		}
	}
}

// fault is an error that came from the other side.
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

// setCommand puts a command into the message. All its fields of type *os.File and []*os.File become
// descriptors beside the message.
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

// command returns the command of a message: the reverse of setCommand. The message still owns the
// descriptors.
func (m *message) command() (sandbox.Command, error) {
	if m.Command == nil {
		return sandbox.Command{}, errors.New("the message has no command, want one")
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
			return c, fmt.Errorf("command.%s: %d descriptors, want a field for them: the other side runs another release", name, len(files))
		}
	}
	return c, nil
}

// kept returns the descriptors that the warden keeps.
func (m *message) kept() ([]*os.File, error) {
	if m.Keep < 0 || m.Keep > len(m.files) {
		return nil, fmt.Errorf("keep: %d descriptors, want 0..%d", m.Keep, len(m.files))
	}
	return m.files[len(m.files)-m.Keep:], nil
}

// close closes the descriptors beside a received message.
func (m *message) close() {
	for _, f := range m.files {
		_ = f.Close() // nothing was written through it
	}
	m.files = nil
}

// wire sends and receives messages. One goroutine may receive; several may send.
type wire struct {
	conn    *net.UnixConn
	sending sync.Mutex
	buf     []byte
	rights  []byte
}

func newWire(conn *net.UnixConn) *wire {
	return &wire{conn: conn, buf: make([]byte, maxMessage+1), rights: make([]byte, unix.CmsgSpace(4*maxRights))}
}

// sendTimeout bounds how long the other side may stop reading.
const sendTimeout = 10 * time.Second

// send sends a message. If the error is errTooLarge, nothing was sent and the connection can still
// be used.
func (w *wire) send(m message) error {
	w.sending.Lock()
	defer w.sending.Unlock()
	return w.sendLocked(m)
}

// errTooLarge means that a message was not sent.
var errTooLarge = errors.New("too large for a message")

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

// write sends bytes and the descriptors of files. The files must stay open meanwhile.
func (w *wire) write(b []byte, files []*os.File, fds []int) error {
	if len(files) > 0 {
		raw, err := files[0].SyscallConn() // Fd would make the file a blocking one
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
	_ = w.conn.SetWriteDeadline(time.Now().Add(sendTimeout)) // if this fails, the write fails
	_, _, err := w.conn.WriteMsgUnix(b, rights, nil)
	return err
}

// receive returns the next message. The caller owns its descriptors.
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

// received returns the descriptors of the control messages in oob.
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
			continue // another kind of control message
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received")) // a nonblocking descriptor is polled
		}
	}
	return files, nil
}
