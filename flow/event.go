package flow

import (
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/task"
)

// Event is something that happened: one of [Start], [Replied], [Canceled] and [Tick].
type Event interface{ event() }

// Start brings a request and the graph that it walks. Loads has an entry for each of the graph's stages, in their order; the
// core does not keep it.
type Start struct {
	Request task.Request
	Graph   pipeline.Pipeline // without faults
	Loads   []task.Load
}

// Replied brings the end of an attempt of a task. The core keeps parts of it.
type Replied struct{ Reply *task.Reply }

// Canceled says that nobody waits for the request any more.
type Canceled struct{ Request string }

// Tick says that time has passed, see [Core.Next].
type Tick struct{}

func (Start) event()    {}
func (Replied) event()  {}
func (Canceled) event() {}
func (Tick) event()     {}

// Effect is something that the core wants done: one of [Submit], [Expect], [Cancel], [Leave] and
// [Finish].
type Effect interface{ effect() }

// Submit sends a task to the owner of its function. ReplyTo is the shell's to set.
type Submit struct{ Task *task.Task }

// Expect tells the owner of Function, which has no replica, that a request in an earlier stage will
// need one. It is sent when the request begins.
type Expect struct{ Function string }

// Cancel tells the owner of function that nobody waits for the task.
type Cancel struct {
	Key      task.Key
	Function string
}

// Leave tells the owner of Function that a request with several tasks for it sends no more, so that
// no replica of their revision has to be kept for it.
type Leave struct{ Request, Function string }

// Finish ends a request: exactly one of Response and Error is set. The request's blobs may go once the response's output has
// been read; Blobs is false when there are none.
type Finish struct {
	Request  string
	Response *task.Response
	Error    *task.Error
	Blobs    bool
}

func (Submit) effect() {}
func (Expect) effect() {}
func (Cancel) effect() {}
func (Leave) effect()  {}
func (Finish) effect() {}
