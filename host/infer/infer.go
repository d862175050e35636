// Package infer is one inference inside the host: what is asked, where each tensor lies,
// and who gives what back when.
//
// A Request owns an arena lease with its inline inputs and references to regions; both are
// given back by Close, after the stub answered or died. A Response owns a claim on the
// stub's output memory, given back by Close, after the last byte was sent.
package infer

import (
	"context"
	"time"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/region"
	"github.com/nereid-serve/nereid/host/stats"
	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/wire"
	"github.com/nereid-serve/nereid/tensor"
)

// RegionRef is a client's wish that a tensor be read from, or written to, its region.
type RegionRef struct {
	Name     string
	Offset   uint64
	ByteSize uint64
}

// Input is one input as the client gave it.
type Input struct {
	Name     string
	DataType tensor.DataType
	Shape    tensor.Shape
	// ByteSize is the size of the data that comes with the request; with Region set it is 0.
	ByteSize uint64
	Region   *RegionRef
}

// Output is one output that the client asked for.
type Output struct {
	Name   string
	Region *RegionRef
}

// Request is one inference.
type Request struct {
	Ctx     context.Context
	ID      string
	Inputs  []Input
	Outputs []Output // none: every output

	CorrelationID   uint64
	CorrelationText string
	SequenceFlags   uint32
	Priority        uint32
	TimeoutMicros   uint64
	Parameters      string // JSON object, "" for none

	Received time.Time // when the endpoint had read it
	Queued   time.Time // when it was given to the scheduler
	Sent     time.Time // when it was given to an instance

	// Frame is what the stub is told. The model fills it in from the fields above.
	Frame     wire.Request
	BatchSize uint64 // 0 where the model does not batch

	Regions []*region.Region // by use, with one reference each
	lease   arena.Lease
	done    chan *Response
}

// SetLease gives the request the memory of its inline inputs.
func (r *Request) SetLease(l arena.Lease) { r.lease = l }

// Lease is the memory of the inline inputs.
func (r *Request) Lease() *arena.Lease { return &r.lease }

// Open makes a request that can be answered. It is closed once it was, or was never sent.
func (r *Request) Open() { r.done = make(chan *Response, 1) }

// Complete hands the response over. It is called exactly once for a request that a
// scheduler accepted.
func (r *Request) Complete(response *Response) { r.done <- response }

// Done is where the response comes.
func (r *Request) Done() <-chan *Response { return r.done }

// Close gives back what the request holds.
func (r *Request) Close() {
	r.lease.Release()
	for _, g := range r.Regions {
		g.Release()
	}
	r.Regions = nil
}

// TakeMemory takes what Close would give back; the caller calls the returned function instead.
func (r *Request) TakeMemory() func() {
	lease, regions := r.lease, r.Regions
	r.lease, r.Regions = arena.Lease{}, nil
	return func() {
		lease.Release()
		for _, g := range regions {
			g.Release()
		}
	}
}

// OutputTensor is one output as the stub gave it, checked.
type OutputTensor struct {
	Name     string
	DataType tensor.DataType
	Shape    tensor.Shape
	// Data is a view of the stub's memory, valid until the response is closed; the stub may
	// change it meanwhile. It is nil where Region is set: the stub has written there.
	Data   []byte
	Region *RegionRef
}

// Response is the answer to a request: outputs, or an error.
type Response struct {
	Err     error
	Outputs []OutputTensor
	Spans   stats.Spans
	// Executed tells whether the request reached the author's code; Failed, whether that
	// execution failed as a whole. An error of one request alone counts as an answer, as in Triton.
	Executed, Failed bool
	// Close gives the outputs' memory back to the stub; nil where there is none.
	Release func()
}

// Failed is a response with an error that never reached an execution.
func Failed(err error) *Response { return &Response{Err: err} }

// Unavailable makes such a response for a model that can't answer now.
func Unavailable(format string, args ...any) *Response {
	return Failed(errcode.Errorf(errcode.Unavailable, format, args...))
}

// Close ends the response; it may be called on one without memory.
func (r *Response) Close() {
	if r.Release != nil {
		r.Release()
		r.Release = nil
	}
}
