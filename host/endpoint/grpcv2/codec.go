package grpcv2

import (
	"fmt"
	"math"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/endpoint"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/tensor"
)

// codec is protobuf's, but for the two messages of ModelInfer: a request's raw contents are
// copied once, from the transport's buffers into the lease, and a response's outputs are
// sent from the stub's memory.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if r, ok := v.(*inferRequest); ok {
		return r.unmarshal(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*inferResponse); ok {
		return r.marshal(), nil
	}
	return c.CodecV2.Marshal(v)
}

// span is a part of a message that may lie in several of the transport's buffers.
type span struct {
	first []byte
	rest  [][]byte
	size  int
}

func (s *span) copyTo(dst []byte) {
	n := copy(dst, s.first)
	for _, b := range s.rest {
		n += copy(dst[n:], b)
	}
}

// cursor reads a message that lies in several buffers.
type cursor struct {
	bufs mem.BufferSlice
	cur  []byte
	left int
}

func newCursor(data mem.BufferSlice) *cursor {
	return &cursor{bufs: data, left: data.Len()}
}

var errTruncated = fmt.Errorf("message ends too early")

func (c *cursor) fill() bool {
	for len(c.cur) == 0 {
		if len(c.bufs) == 0 {
			return false
		}
		c.cur, c.bufs = c.bufs[0].ReadOnlyData(), c.bufs[1:]
	}
	return true
}

func (c *cursor) varint() (uint64, error) {
	if v, n := protowire.ConsumeVarint(c.cur); n > 0 {
		c.cur, c.left = c.cur[n:], c.left-n
		return v, nil
	}
	var v uint64
	for shift := 0; shift < 64; shift += 7 {
		if !c.fill() {
			return 0, errTruncated
		}
		b := c.cur[0]
		c.cur, c.left = c.cur[1:], c.left-1
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return v, nil
		}
	}
	return 0, fmt.Errorf("number is too long")
}

func (c *cursor) span(n uint64) (s span, err error) {
	if n > uint64(c.left) {
		return s, errTruncated
	}
	s.size = int(n)
	for left := int(n); left > 0; {
		if !c.fill() {
			return s, errTruncated
		}
		take := min(left, len(c.cur))
		if s.first == nil {
			s.first = c.cur[:take]
		} else {
			s.rest = append(s.rest, c.cur[:take])
		}
		c.cur, c.left, left = c.cur[take:], c.left-take, left-take
	}
	return s, nil
}

// bytes is span in one piece; it copies only what lies in several buffers.
func (c *cursor) bytes(n uint64) ([]byte, error) {
	s, err := c.span(n)
	if err != nil || s.rest == nil {
		return s.first, err
	}
	out := make([]byte, s.size)
	s.copyTo(out)
	return out, nil
}

// inferRequest is inference.ModelInferRequest. Faults that are the client's, not the wire's,
// are kept for the handler, which answers them with their own code.
type inferRequest struct {
	model, version string
	request        infer.Request
	params         *endpoint.Params
	contents       []contents // by input
	raw            []span     // raw_input_contents
	buffers        mem.BufferSlice
	fault          error
}

// contents is the data that came in an input's own message.
type contents struct {
	given   bool
	message []byte // InferTensorContents
	data    []byte // its raw form
}

func (r *inferRequest) note(err error) {
	if r.fault == nil {
		r.fault = err
	}
}

// free gives the transport's buffers back; the raw contents are not valid afterwards.
func (r *inferRequest) free() {
	r.buffers.Free()
	r.buffers = nil
}

func (r *inferRequest) unmarshal(data mem.BufferSlice) error {
	data.Ref() // raw contents are copied later, when it is known where to
	r.buffers = data
	r.params = endpoint.NewParams(&r.request)
	c := newCursor(data)
	for c.left > 0 {
		tag, err := c.varint()
		if err != nil {
			return err
		}
		number, kind := protowire.DecodeTag(tag)
		if kind != protowire.BytesType {
			if err := c.skip(kind); err != nil {
				return err
			}
			continue
		}
		n, err := c.varint()
		if err != nil {
			return err
		}
		if number == 7 {
			s, err := c.span(n)
			if err != nil {
				return err
			}
			r.raw = append(r.raw, s)
			continue
		}
		b, err := c.bytes(n)
		if err != nil {
			return err
		}
		switch number {
		case 1:
			r.model = string(b)
		case 2:
			r.version = string(b)
		case 3:
			r.request.ID = string(b)
		case 4:
			key, value, err := parameter(b)
			if err != nil {
				return err
			}
			r.note(r.params.Add(key, value))
		case 5:
			err = r.input(b)
		case 6:
			err = r.output(b)
		}
		if err != nil {
			return err
		}
	}
	r.params.Done()
	return nil
}

func (c *cursor) skip(kind protowire.Type) error {
	var n uint64
	switch kind {
	case protowire.VarintType:
		_, err := c.varint()
		return err
	case protowire.Fixed32Type:
		n = 4
	case protowire.Fixed64Type:
		n = 8
	default:
		return fmt.Errorf("field of wire type %d", kind)
	}
	_, err := c.span(n)
	return err
}

// fields calls f for each field of a message in one piece: value for numbers, b for bytes.
func fields(b []byte, f func(number protowire.Number, kind protowire.Type, value uint64, b []byte) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		var value uint64
		var inner []byte
		switch kind {
		case protowire.VarintType:
			value, n = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			value, n = protowire.ConsumeFixed64(b)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(b)
			value = uint64(v)
		case protowire.BytesType:
			inner, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := f(number, kind, value, inner); err != nil {
			return err
		}
	}
	return nil
}

// parameter reads an entry of map<string, InferParameter>.
func parameter(b []byte) (key string, value any, err error) {
	err = fields(b, func(number protowire.Number, _ protowire.Type, _ uint64, b []byte) error {
		switch number {
		case 1:
			key = string(b)
		case 2:
			return fields(b, func(number protowire.Number, _ protowire.Type, v uint64, b []byte) error {
				switch number {
				case 1:
					value = v != 0
				case 2:
					value = int64(v)
				case 3:
					value = string(b)
				case 4:
					value = math.Float64frombits(v)
				case 5:
					value = v
				}
				return nil
			})
		}
		return nil
	})
	return key, value, err
}

func (r *inferRequest) input(b []byte) error {
	var in infer.Input
	var c contents
	var ref regionParams
	err := fields(b, func(number protowire.Number, kind protowire.Type, value uint64, b []byte) (err error) {
		switch number {
		case 1:
			in.Name = string(b)
		case 2:
			in.DataType = tensor.ParseDataType(string(b))
			if in.DataType == tensor.Invalid {
				r.note(errcode.Errorf(errcode.InvalidArg, "inference input '%s' has unknown data-type %q", in.Name, b))
			}
		case 3:
			in.Shape, err = dims(in.Shape, kind, value, b)
		case 4:
			var key string
			var value any
			if key, value, err = parameter(b); err == nil {
				r.note(ref.add(in.Name, key, value))
			}
		case 5:
			c.given, c.message = true, append(c.message, b...)
		}
		return err
	})
	in.Region = ref.get()
	r.request.Inputs = append(r.request.Inputs, in)
	r.contents = append(r.contents, c)
	return err
}

func dims(shape tensor.Shape, kind protowire.Type, value uint64, b []byte) (tensor.Shape, error) {
	if kind != protowire.BytesType {
		return append(shape, int64(value)), nil
	}
	if shape == nil {
		shape = make(tensor.Shape, 0, 4)
	}
	for len(b) > 0 {
		v, n := protowire.ConsumeVarint(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		shape, b = append(shape, int64(v)), b[n:]
	}
	return shape, nil
}

func (r *inferRequest) output(b []byte) error {
	var out infer.Output
	var ref regionParams
	err := fields(b, func(number protowire.Number, _ protowire.Type, _ uint64, b []byte) error {
		switch number {
		case 1:
			out.Name = string(b)
		case 2:
			key, value, err := parameter(b)
			if err != nil {
				return err
			}
			if key == "classification" {
				r.note(errcode.Errorf(errcode.Unsupported, "output '%s': the classification extension is not supported yet", out.Name))
			}
			r.note(ref.add(out.Name, key, value))
		}
		return nil
	})
	out.Region = ref.get()
	r.request.Outputs = append(r.request.Outputs, out)
	return err
}

// regionParams collects the shared_memory_* parameters of a tensor.
type regionParams struct {
	ref  infer.RegionRef
	some bool
}

func (p *regionParams) add(name, key string, value any) error {
	var n *uint64
	switch key {
	case "shared_memory_region":
		text, ok := value.(string)
		if !ok {
			return errcode.Errorf(errcode.InvalidArg, "invalid value type for '%s' parameter of tensor '%s', expected string_param.", key, name)
		}
		p.ref.Name, p.some = text, true
		return nil
	case "shared_memory_offset":
		n = &p.ref.Offset
	case "shared_memory_byte_size":
		n = &p.ref.ByteSize
	default:
		return nil
	}
	v, ok := value.(int64)
	if !ok || v < 0 {
		return errcode.Errorf(errcode.InvalidArg, "invalid value for '%s' parameter of tensor '%s', expected a non-negative int64_param.", key, name)
	}
	*n = uint64(v)
	return nil
}

func (p *regionParams) get() *infer.RegionRef {
	if !p.some {
		return nil
	}
	return &p.ref
}

// settle finds the data of each input: its region, its contents, or the next raw contents.
func (r *inferRequest) settle() error {
	if r.fault != nil {
		return r.fault
	}
	next := 0
	for i := range r.request.Inputs {
		in, c := &r.request.Inputs[i], &r.contents[i]
		switch {
		case in.Region != nil:
			if c.given {
				return errcode.Errorf(errcode.InvalidArg, "unexpected 'contents' for input '%s', which lies in shared memory, for model '%s'", in.Name, r.model)
			}
		case len(r.raw) > 0 && c.given:
			return errcode.Errorf(errcode.InvalidArg, "contents field must not be specified when using raw_input_contents for '%s' for model '%s'", in.Name, r.model)
		case len(r.raw) > next:
			in.ByteSize = uint64(r.raw[next].size)
			next++
		case c.given:
			data, err := typedContents(in.DataType, c.message)
			if err != nil {
				return errcode.Errorf(errcode.InvalidArg, "input '%s' for model '%s': %w", in.Name, r.model, err)
			}
			c.data, in.ByteSize = data, uint64(len(data))
		default:
			return errcode.Errorf(errcode.InvalidArg, "unable to find data for inference input '%s' for model '%s' in request.", in.Name, r.model)
		}
	}
	return nil
}

// fill puts the inline inputs into their lease.
func (r *inferRequest) fill(at func(int) []byte) error {
	next := 0
	for i := range r.request.Inputs {
		switch {
		case r.request.Inputs[i].Region != nil:
		case r.contents[i].given:
			copy(at(i), r.contents[i].data)
		default:
			r.raw[next].copyTo(at(i))
			next++
		}
	}
	return nil
}
