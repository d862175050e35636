package sdk

import (
	"encoding/binary"
	"encoding/json"
	"sync/atomic"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/wire"
	"github.com/nereid-serve/nereid/tensor"
)

// Request is one inference to answer.
type Request struct {
	instance  *instance
	execution *execution
	frame     wire.Request
	inputs    []Tensor
	outputs   []*Tensor
	leases    []arena.Lease
	err       error

	executionFailed bool
	cancelled       atomic.Bool
}

// ID is the client's request id, "" where it gave none.
func (r *Request) ID() string { return r.frame.RequestID }

// Parameters are the request's parameters as a JSON object.
func (r *Request) Parameters() json.RawMessage {
	if r.frame.Parameters == "" {
		return json.RawMessage("{}")
	}
	return json.RawMessage(r.frame.Parameters)
}

// CorrelationID is the sequence the request belongs to: a number, or a text; 0 and "" for none.
func (r *Request) CorrelationID() (uint64, string) {
	return r.frame.CorrelationID, r.frame.CorrelationText
}

// SequenceStart and SequenceEnd tell whether the request is a sequence's first, or last.
func (r *Request) SequenceStart() bool { return r.frame.SequenceFlags&1 != 0 }
func (r *Request) SequenceEnd() bool   { return r.frame.SequenceFlags&2 != 0 }

// Priority is the request's priority, 0 for the model's default.
func (r *Request) Priority() uint32 { return r.frame.Priority }

// Cancelled tells whether the client has gone; the answer will not be read.
func (r *Request) Cancelled() bool { return r.cancelled.Load() }

// Inputs are all inputs of the request.
func (r *Request) Inputs() []Tensor { return r.inputs }

// Input is the input of that name. Errors: InvalidArg where the request has none.
func (r *Request) Input(name string) (*Tensor, error) {
	for i := range r.inputs {
		if r.inputs[i].Name == name {
			return &r.inputs[i], nil
		}
	}
	return nil, invalidf("request has no input '%s'", name)
}

// Wanted tells whether the client asks for this output.
func (r *Request) Wanted(output string) bool {
	_, _, ok := r.placement(output)
	return ok
}

func (r *Request) placement(output string) (index uint16, p *wire.Placement, wanted bool) {
	index, known := r.instance.stub.outputIndex[output]
	if !known {
		return 0, nil, false
	}
	for i := range r.frame.Outputs {
		if r.frame.Outputs[i].Index == index {
			return index, &r.frame.Outputs[i], true
		}
	}
	return index, nil, r.frame.Flags&wire.FlagAllOutputs != 0
}

// Output allocates an output of a fixed-size datatype for the author to fill. The memory is
// the client's region where the request names one for it, else a segment that the host
// reads; its contents are undefined. For an output that is not Wanted it is memory that
// nobody reads. An output is allocated once.
//
// Errors: InvalidArg for a name that the model's configuration does not have, a negative
// dimension, and BYTES (see OutputBytes); Internal where the client's region is too small;
// Unavailable where the stub's output memory is used up.
func (r *Request) Output(name string, datatype tensor.DataType, shape tensor.Shape) (*Tensor, error) {
	size, ok := tensor.ByteSize(datatype, shape)
	if !ok {
		return nil, invalidf("output '%s' of datatype %s and shape %s has no fixed byte size", name, datatype, shape)
	}
	return r.allocate(name, datatype, shape, uint64(size))
}

// OutputBytes is Output for BYTES: it writes the elements, in row-major order.
func (r *Request) OutputBytes(name string, shape tensor.Shape, elements [][]byte) (*Tensor, error) {
	if n, ok := shape.Elements(); !ok || n != int64(len(elements)) {
		return nil, invalidf("output '%s' of shape %s was given %d elements", name, shape, len(elements))
	}
	size := uint64(0)
	for _, e := range elements {
		size += 4 + uint64(len(e))
	}
	t, err := r.allocate(name, tensor.Bytes, shape, size)
	if err != nil {
		return nil, err
	}
	at := t.data
	for _, e := range elements {
		binary.LittleEndian.PutUint32(at, uint32(len(e)))
		at = at[4+copy(at[4:], e):]
	}
	return t, nil
}

// OutputRaw is Output with the byte size given: for BYTES that are encoded already, as when
// one tensor is passed on.
func (r *Request) OutputRaw(name string, datatype tensor.DataType, shape tensor.Shape, byteSize int) (*Tensor, error) {
	if byteSize < 0 || !datatype.Valid() {
		return nil, invalidf("output '%s': datatype %s, byte size %d", name, datatype, byteSize)
	}
	return r.allocate(name, datatype, shape, uint64(byteSize))
}

func (r *Request) allocate(name string, datatype tensor.DataType, shape tensor.Shape, byteSize uint64) (*Tensor, error) {
	index, placement, wanted := r.placement(name)
	if _, known := r.instance.stub.outputIndex[name]; !known {
		return nil, invalidf("model has no output '%s'", name)
	}
	for _, o := range r.outputs {
		if o.Name == name {
			return nil, invalidf("output '%s' was allocated before", name)
		}
	}
	if len(shape) > 255 {
		return nil, invalidf("output '%s' has %d dimensions", name, len(shape))
	}
	t := &Tensor{Name: name, DataType: datatype, Shape: append(tensor.Shape(nil), shape...), index: index}
	switch {
	case !wanted:
		t.data = make([]byte, byteSize)
		return t, nil
	case placement != nil && placement.Placed:
		if placement.ByteSize < byteSize {
			return nil, errcode.Errorf(errcode.Internal, "shared memory size specified with the request for output '%s' (%d bytes) should be at least %d bytes to hold the results", name, placement.ByteSize, byteSize)
		}
		data, err := r.instance.stub.view(placement.Segment, placement.Offset, byteSize)
		if err != nil {
			return nil, err
		}
		t.data, t.segment, t.offset = data, placement.Segment, placement.Offset
	case byteSize > 0:
		lease, err := r.instance.stub.arena.Lease(byteSize)
		if err != nil {
			return nil, errcode.Errorf(errcode.Unavailable, "output '%s': %w; raise --output-arena-byte-size", name, err)
		}
		r.leases = append(r.leases, lease)
		t.data, t.segment, t.offset = lease.Data(), lease.Segment(), lease.Offset()
	}
	r.outputs = append(r.outputs, t)
	return t, nil
}

// Fail answers the request with an error; its code is the error's (see errcode). Outputs
// that were allocated are dropped.
func (r *Request) Fail(err error) {
	if r.err == nil {
		r.err = err
	}
}
