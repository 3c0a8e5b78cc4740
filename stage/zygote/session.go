package zygote

// #include <stdlib.h>
// #include "zygote.h"
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Info describes an input or output of a model.
type Info struct {
	Name     string
	Datatype tensor.Datatype
	Shape    []int64 // -1: any length; nil: the model does not give the number of dimensions
}

// String returns the datatype and the shape, as in messages.
func (i Info) String() string { return describe(i.Datatype, i.Shape) }

// Session is a loaded model. Several goroutines may call its methods at the same time.
type Session struct {
	model           string
	inputs, outputs []Info

	mu sync.RWMutex // only Close takes it for writing
	c  *C.sc_session
}

// maxRank is the maximum number of dimensions of a tensor.
const maxRank = C.SC_MAX_RANK

// ErrClosed is returned by Run after Close.
var ErrClosed = errors.New("session is closed")

// Options say how an ordinary process loads a model.
type Options struct {
	Library string // path of ONNX Runtime's library
	Model   string // path of the model
	Threads int    // maximum number of threads per Run, 1 to 256, with the calling thread
	// Start is how many of these threads compute from the start, at least 1. AddThreads adds the
	// others.
	Start int
	// Prepacked is the folder of the model's pre-packed form; see the package comment. Open loads that
	// form if it exists, and never writes it. If Prepacked is empty, Open loads the model itself.
	Prepacked string
	// Mapped says that the pre-packed form is in the files at descriptors 4 and 5; see the package
	// comment.
	Mapped bool
}

// Open loads a model in an ordinary process. A process loads the library once.
func Open(o Options) (*Session, error) {
	if o.Threads < 1 || o.Threads > C.SC_MAX_THREADS {
		return nil, fmt.Errorf("model %s: %d threads, want 1..%d", o.Model, o.Threads, C.SC_MAX_THREADS)
	}
	library, model, folder := C.CString(o.Library), C.CString(o.Model), C.CString(o.Prepacked)
	defer C.free(unsafe.Pointer(library))
	defer C.free(unsafe.Pointer(model))
	defer C.free(unsafe.Pointer(folder))
	var version *C.char
	if message := C.sc_load(library, &version); message != nil {
		return nil, errors.New(goError(message))
	}
	options := C.sc_options{model: model, threads: C.int(o.Threads)}
	var session *C.sc_session
	var message *C.char
	if o.Mapped {
		message = C.sc_open_mapped(&options, &session)
		// The mappings stay, and child processes must not inherit the files.
		for _, fd := range []int{C.SC_GRAPH_FD, C.SC_WEIGHTS_FD} {
			_ = unix.Close(fd)
		}
	} else if session = C.sc_open_prepacked(folder, version, &options, 0); session == nil {
		message = C.sc_open(&options, &session)
	}
	if message != nil {
		return nil, fmt.Errorf("model %s: %s", o.Model, goError(message))
	}
	s := newSession(session)
	if _, err := s.AddThreads(o.Start); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// AddThreads raises the number of threads that compute one Run, and returns the new number. total
// is the wanted number, including the calling thread. The maximum is the number that the session
// was made for. If total is below the present number, nothing changes, because AddThreads never
// removes threads.
func (s *Session) AddThreads(total int) (int, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.c == nil {
		return 0, fmt.Errorf("model %s: %w", s.model, ErrClosed)
	}
	var running C.int
	if message := C.sc_start_threads(s.c, C.int(min(total, C.SC_MAX_THREADS)-1), &running); message != nil {
		return int(running) + 1, fmt.Errorf("model %s: %s", s.model, goError(message))
	}
	return int(running) + 1, nil
}

func newSession(c *C.sc_session) *Session {
	return &Session{
		model:   C.GoString(c.model),
		inputs:  infos(unsafe.Slice(c.inputs, c.n_inputs)),
		outputs: infos(unsafe.Slice(c.outputs, c.n_outputs)),
		c:       c,
	}
}

func infos(of []C.sc_tensor) []Info {
	all := make([]Info, len(of))
	for i := range of {
		all[i] = Info{Name: C.GoString(of[i].name), Datatype: datatypeOf(int32(of[i]._type)), Shape: shapeOf(&of[i])}
	}
	return all
}

func shapeOf(t *C.sc_tensor) []int64 {
	if t.rank < 0 {
		return nil
	}
	shape := make([]int64, t.rank)
	for i := range shape {
		shape[i] = int64(t.dims[i])
	}
	return shape
}

// Inputs returns the inputs of the model, in the model's order.
func (s *Session) Inputs() []Info { return slices.Clone(s.inputs) }

// Outputs returns the outputs of the model, in the model's order.
func (s *Session) Outputs() []Info { return slices.Clone(s.outputs) }

// Served returns an error if the model has an input or output of a datatype that Run cannot take or
// return, such as strings. If only outputs have such types, a Run that asks for the other outputs
// still works.
func (s *Session) Served() error {
	for i, info := range slices.Concat(s.inputs, s.outputs) {
		what := "output"
		if i < len(s.inputs) {
			what = "input"
		}
		if sizeOf(info.Datatype) == 0 {
			return fmt.Errorf("model %s: %s %q is %s, want numbers or BOOL", s.model, what, info.Name, info)
		}
	}
	return nil
}

// Run runs the model on the inputs, which may be in any order. It returns the named outputs in the
// order of the names; without names, it returns all outputs of the model. It reads the data of the
// inputs in place, so the data must not change meanwhile. The outputs belong to the caller.
//
// Run takes every datatype of the Open Inference Protocol except BYTES.
func (s *Session) Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.c == nil {
		return nil, fmt.Errorf("model %s: %w", s.model, ErrClosed)
	}
	var pins runtime.Pinner
	defer pins.Unpin()
	in, err := s.bindInputs(&pins, inputs)
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", s.model, err)
	}
	out, err := s.bindOutputs(outputs)
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", s.model, err)
	}
	if message := C.sc_run(s.c, C.size_t(len(in)), unsafe.SliceData(in), C.size_t(len(out)), unsafe.SliceData(out)); message != nil {
		return nil, fmt.Errorf("model %s: %s; inputs were %s", s.model, goError(message), describeAll(inputs))
	}
	defer C.sc_release(C.size_t(len(out)), unsafe.SliceData(out))
	return copyOutputs(out)
}

// bindInputs checks the inputs against the model and pins their data.
func (s *Session) bindInputs(pins *runtime.Pinner, inputs []tensor.Tensor) ([]C.sc_tensor, error) {
	known := unsafe.Slice(s.c.inputs, s.c.n_inputs)
	bound := make([]C.sc_tensor, 0, len(known))
	seen := make([]bool, len(known))
	for i := range inputs {
		t := &inputs[i]
		at := slices.IndexFunc(s.inputs, func(info Info) bool { return info.Name == t.Name })
		if at < 0 {
			return nil, fmt.Errorf("input %q is unknown, want %s", t.Name, names(s.inputs))
		}
		if seen[at] {
			return nil, fmt.Errorf("input %q is given twice", t.Name)
		}
		seen[at] = true
		if err := s.inputs[at].accepts(t); err != nil {
			return nil, err
		}
		b := C.sc_tensor{name: known[at].name, _type: known[at]._type, rank: C.int32_t(len(t.Shape)), bytes: C.size_t(len(t.Data))}
		for d, n := range t.Shape {
			b.dims[d] = C.int64_t(n)
		}
		if len(t.Data) > 0 {
			data := aligned(t.Data, sizeOf(t.Datatype))
			pins.Pin(unsafe.SliceData(data))
			b.data = unsafe.Pointer(unsafe.SliceData(data))
		}
		bound = append(bound, b)
	}
	if at := slices.Index(seen, false); at >= 0 {
		return nil, fmt.Errorf("input %q is missing, want %s", s.inputs[at].Name, s.inputs[at])
	}
	return bound, nil
}

// bindOutputs returns the named outputs for the C side.
func (s *Session) bindOutputs(outputs []string) ([]C.sc_tensor, error) {
	known := unsafe.Slice(s.c.outputs, s.c.n_outputs)
	if len(outputs) == 0 {
		bound := make([]C.sc_tensor, len(known))
		for i := range known {
			bound[i].name = known[i].name
		}
		return bound, nil
	}
	bound := make([]C.sc_tensor, len(outputs))
	for i, name := range outputs {
		at := slices.IndexFunc(s.outputs, func(info Info) bool { return info.Name == name })
		if at < 0 {
			return nil, fmt.Errorf("output %q is unknown, want %s", name, names(s.outputs))
		}
		bound[i].name = known[at].name
	}
	return bound, nil
}

// copyOutputs copies outputs from ONNX Runtime's memory.
func copyOutputs(out []C.sc_tensor) ([]tensor.Tensor, error) {
	all := make([]tensor.Tensor, len(out))
	for i := range out {
		t := tensor.Tensor{Name: C.GoString(out[i].name), Datatype: datatypeOf(int32(out[i]._type)), Shape: shapeOf(&out[i])}
		size := sizeOf(t.Datatype)
		if size == 0 {
			return nil, fmt.Errorf("output %q: datatype %s cannot be served", t.Name, t.Datatype)
		}
		for _, n := range t.Shape {
			size *= int(n)
		}
		t.Data = make([]byte, size)
		copy(t.Data, unsafe.Slice((*byte)(out[i].data), size))
		all[i] = t
	}
	return all, nil
}

// Close waits for running Runs, frees the model and ends its threads. A second Close does nothing.
func (s *Session) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c != nil {
		C.sc_close(s.c)
		s.c = nil
	}
}

func names(of []Info) string {
	all := make([]string, len(of))
	for i := range of {
		all[i] = of[i].Name + " " + of[i].String()
	}
	return strings.Join(all, ", ")
}
