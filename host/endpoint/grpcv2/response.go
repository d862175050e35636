package grpcv2

import (
	"fmt"
	"slices"
	"sync/atomic"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nereid-serve/nereid/host/infer"
)

// inferResponse is inference.ModelInferResponse. marshal takes the response over.
type inferResponse struct {
	model, id string
	version   int64
	response  *infer.Response
	copied    *atomic.Uint64 // counts the bytes that marshal copies
}

// borrowFrom is the size from which outputs are sent from the stub's memory; smaller ones are
// cheaper to copy than to count references for.
const borrowFrom = 16 << 10

func (r *inferResponse) marshal() mem.BufferSlice {
	head := make([]byte, 0, 256)
	head = appendString(head, 1, r.model)
	head = appendString(head, 2, fmt.Sprint(r.version))
	head = appendString(head, 3, r.id)
	for i := range r.response.Outputs {
		o := &r.response.Outputs[i]
		var inner [512]byte
		b := appendString(inner[:0], 1, o.Name)
		b = appendString(b, 2, o.DataType.String())
		n := 0
		for _, d := range o.Shape {
			n += protowire.SizeVarint(uint64(d))
		}
		if n > 0 {
			b = protowire.AppendTag(b, 3, protowire.BytesType)
			b = protowire.AppendVarint(b, uint64(n))
			for _, d := range o.Shape {
				b = protowire.AppendVarint(b, uint64(d))
			}
		}
		head = protowire.AppendTag(head, 5, protowire.BytesType)
		head = protowire.AppendBytes(head, b)
	}
	var out mem.BufferSlice
	borrowed := 0
	for i := range r.response.Outputs {
		data := r.response.Outputs[i].Data
		head = protowire.AppendTag(head, 6, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(len(data)))
		if len(data) < borrowFrom {
			head = append(head, data...)
			r.copied.Add(uint64(len(data)))
			continue
		}
		out = append(out, mem.SliceBuffer(head), nil)
		borrowed++
		head = nil
	}
	if len(head) > 0 {
		out = append(out, mem.SliceBuffer(head))
	}
	if borrowed == 0 {
		r.response.Close()
		return out
	}
	// The last buffer that the transport is done with gives the stub its memory back.
	back := &giveBack{response: r.response}
	back.left.Store(int32(borrowed))
	at := 0
	for i := range r.response.Outputs {
		if data := r.response.Outputs[i].Data; len(data) >= borrowFrom {
			at += slices.IndexFunc(out[at:], func(b mem.Buffer) bool { return b == nil })
			out[at] = mem.NewBuffer(&data, back)
		}
	}
	return out
}

func appendString(b []byte, number protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, number, protowire.BytesType), s)
}

// giveBack is the buffer pool of borrowed outputs: the last one put back closes the response.
type giveBack struct {
	left     atomic.Int32
	response *infer.Response
}

func (g *giveBack) Get(n int) *[]byte { b := make([]byte, n); return &b }

func (g *giveBack) Put(*[]byte) {
	if g.left.Add(-1) == 0 {
		g.response.Close()
	}
}
