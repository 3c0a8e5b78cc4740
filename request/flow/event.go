package flow

import (
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Event is an input of the core: one of [Start], [Replied], [Outlined], [Canceled] and [Tick].
type Event interface{ event() }

// Start begins a request on a graph. Loads has one entry per stage of the graph, in the same order.
// The core does not keep Loads.
type Start struct {
	Request task.Request
	Graph   pipeline.Pipeline // must have no faults
	Loads   []task.Load
	// Outlines has one entry per item of the request's input. It may be nil if no item is a
	// reference, or if the entry stage does not measure lengths.
	Outlines []tensor.Outline
}

// Replied reports the end of an attempt of a task. The core keeps references to Reply.
type Replied struct{ Reply *task.Reply }

// Outlined is Replied for an output that has references and must be measured. Outlines has one
// entry per item of the output.
type Outlined struct {
	Reply    *task.Reply
	Outlines []tensor.Outline
}

// Canceled reports that nobody waits for the request any more.
type Canceled struct{ Request string }

// Tick reports that time has passed; see [Core.Next].
type Tick struct{}

func (Start) event()    {}
func (Replied) event()  {}
func (Outlined) event() {}
func (Canceled) event() {}
func (Tick) event()     {}

// Effect is an output of the core: one of [Submit], [Expect], [Cancel], [Leave] and [Finish].
type Effect interface{ effect() }

// Submit sends a task to the owner of its function. The shell sets ReplyTo.
type Submit struct{ Task *task.Task }

// Expect announces to the owner of Function, which has no replica, that a later stage of a request
// will need one. The core returns Expect when the request begins.
type Expect struct{ Function string }

// Cancel tells the owner of Function that nobody waits for the task any more.
type Cancel struct {
	Key      task.Key
	Function string
}

// Leave tells the owner of Function that a request with several tasks for it will send no more. So
// the owner need not keep replicas of the tasks' revision for the request.
type Leave struct{ Request, Function string }

// Finish ends a request. Exactly one of Response and Error is set. If Blobs is true, the store may
// hold blobs of the request, which may be dropped once the response's output has been read.
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
