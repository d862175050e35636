// Package wire is the layout of the frames on a data channel. docs/frame-layout.md is the
// same for someone who writes a stub in another language, and testdata holds vectors that
// the Go and the Python side both read.
//
// Everything is little-endian. A parsed frame is a copy: the peer cannot change it later.
// Parsing checks that a frame is well-formed; whether its segments, offsets and sizes are
// ones that exist is checked by who knows them.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/nereid-serve/nereid/tensor"
)

// Kind says what a frame is.
type Kind uint8

const (
	KindRequest Kind = 1 // host to stub: run an inference
	// KindRelease gives memory back. Host to stub: these leases of output segments. Stub to
	// host: the inputs of this request, which a response had kept.
	KindRelease  Kind = 2
	KindCancel   Kind = 3 // host to stub: nobody waits for this request any more
	KindSegment  Kind = 4 // both: the next descriptor is this segment
	KindDrop     Kind = 5 // host to stub: this segment is not used any more
	KindResponse Kind = 16
)

// Flags of a request.
const (
	FlagMore       = 1 << 0 // another request of the same execution follows
	FlagAllOutputs = 1 << 1 // the client named no outputs: every one is wanted
)

// Flags of a response.
const (
	FlagFinal       = 1 << 0 // no more responses to this request
	FlagError       = 1 << 1 // the response is an error
	FlagFailed      = 1 << 2 // the execution as a whole failed, not this request alone
	FlagKeepsInputs = 1 << 3 // the author still refers to inputs; a release frame follows when not
)

// Access says who may do what with a segment.
const (
	AccessInput  = 0 // made by the host; the stub reads
	AccessRegion = 1 // a client's shared memory; the stub reads and writes
	AccessOutput = 2 // made by the stub; the host reads
)

const (
	// HeaderByteSize is the size of the header that every frame begins with.
	HeaderByteSize = 16
	// MaxFrameByteSize bounds a frame; the reader refuses a longer one.
	MaxFrameByteSize = 16 << 20
	// MaxMessageByteSize bounds an error's message: a stub cuts a longer one, so that its
	// answers to the few requests it has fit the socket while nobody reads.
	MaxMessageByteSize = 32 << 10
	// FirstOutputSegment is the lowest number of a stub's own segment; lower ones are the host's.
	FirstOutputSegment = 1 << 31

	requestByteSize  = HeaderByteSize + 40
	tensorByteSize   = 24
	responseByteSize = HeaderByteSize + 24
	segmentByteSize  = HeaderByteSize + 16
)

var errShort = errors.New("frame ends too early")

// Header is what every frame begins with:
//
//	offset width
//	0      4     byte size of the whole frame
//	4      1     kind
//	5      1     flags
//	6      2     count: inputs, outputs or places
//	8      8     id of the request, or number of the segment
type Header struct {
	ByteSize uint32
	Kind     Kind
	Flags    uint8
	Count    uint16
	ID       uint64
}

// ParseHeader reads the header of a frame, which must have HeaderByteSize bytes at least.
func ParseHeader(b []byte) Header {
	_ = b[15]
	return Header{
		binary.LittleEndian.Uint32(b), Kind(b[4]), b[5], binary.LittleEndian.Uint16(b[6:]),
		binary.LittleEndian.Uint64(b[8:]),
	}
}

func begin(dst []byte, kind Kind, flags uint8, count int, id uint64) ([]byte, int) {
	at := len(dst)
	dst = append(dst, 0, 0, 0, 0, byte(kind), flags)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(count))
	return binary.LittleEndian.AppendUint64(dst, id), at
}

func end(dst []byte, at int) []byte {
	binary.LittleEndian.PutUint32(dst[at:], uint32(len(dst)-at))
	return dst
}

// Tensor describes one input or output and where its bytes lie:
//
//	offset width
//	0      2     index of the input or output in the model's configuration
//	2      1     datatype
//	3      1     rank
//	4      4     number of the segment
//	8      8     offset in the segment
//	16     8     byte size
//	24     8×rank dimensions
type Tensor struct {
	Index    uint16
	DataType tensor.DataType
	Segment  uint32
	Offset   uint64
	ByteSize uint64
	Shape    tensor.Shape
}

func appendTensor(dst []byte, t *Tensor) []byte {
	dst = binary.LittleEndian.AppendUint16(dst, t.Index)
	dst = append(dst, byte(t.DataType), byte(len(t.Shape)))
	dst = binary.LittleEndian.AppendUint32(dst, t.Segment)
	dst = binary.LittleEndian.AppendUint64(dst, t.Offset)
	dst = binary.LittleEndian.AppendUint64(dst, t.ByteSize)
	for _, d := range t.Shape {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(d))
	}
	return dst
}

// parseTensor reads one tensor; its shape is appended to dims, whose array it shares.
func parseTensor(b []byte, t *Tensor, dims []int64) (rest []byte, _ []int64, err error) {
	if len(b) < tensorByteSize {
		return nil, dims, errShort
	}
	t.Index = binary.LittleEndian.Uint16(b)
	t.DataType = tensor.DataType(b[2])
	rank := int(b[3])
	t.Segment = binary.LittleEndian.Uint32(b[4:])
	t.Offset = binary.LittleEndian.Uint64(b[8:])
	t.ByteSize = binary.LittleEndian.Uint64(b[16:])
	b = b[tensorByteSize:]
	if len(b) < 8*rank {
		return nil, dims, errShort
	}
	if !t.DataType.Valid() {
		return nil, dims, fmt.Errorf("datatype %d is none", uint8(t.DataType))
	}
	at := len(dims)
	for i := range rank {
		dims = append(dims, int64(binary.LittleEndian.Uint64(b[8*i:])))
	}
	t.Shape = dims[at:len(dims):len(dims)]
	return b[8*rank:], dims, nil
}

// Placement says where a wanted output shall go: 24 bytes, the first 24 of a Tensor, whose
// byte 2 is 1 where the output has a place in a client's region, 0 where the stub chooses.
type Placement struct {
	Index    uint16
	Placed   bool
	Segment  uint32
	Offset   uint64
	ByteSize uint64
}

// Request is one inference. Layout after the header:
//
//	offset width
//	16     8     correlation id, where it is an integer
//	24     8     timeout in microseconds
//	32     4     priority
//	36     4     flags of a sequence: 1 start, 2 end
//	40     2     number of placements
//	42     2     byte size of the request id
//	44     4     byte size of the parameters
//	48     2     byte size of the correlation id, where it is a string
//	50     6     zero
//	56           inputs, placements, request id, parameters (JSON), correlation id
type Request struct {
	ID              uint64
	Flags           uint8
	CorrelationID   uint64
	CorrelationText string
	TimeoutMicros   uint64
	Priority        uint32
	SequenceFlags   uint32
	RequestID       string
	Parameters      string
	Inputs          []Tensor
	Outputs         []Placement

	dims []int64
}

// AppendRequest appends the frame of r to dst.
// The caller keeps counts and lengths below 65536, ranks below 256.
func AppendRequest(dst []byte, r *Request) []byte {
	dst, at := begin(dst, KindRequest, r.Flags, len(r.Inputs), r.ID)
	dst = binary.LittleEndian.AppendUint64(dst, r.CorrelationID)
	dst = binary.LittleEndian.AppendUint64(dst, r.TimeoutMicros)
	dst = binary.LittleEndian.AppendUint32(dst, r.Priority)
	dst = binary.LittleEndian.AppendUint32(dst, r.SequenceFlags)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(r.Outputs)))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(r.RequestID)))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(r.Parameters)))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(r.CorrelationText)))
	dst = append(dst, 0, 0, 0, 0, 0, 0)
	for i := range r.Inputs {
		dst = appendTensor(dst, &r.Inputs[i])
	}
	for i := range r.Outputs {
		p := &r.Outputs[i]
		placed := byte(0)
		if p.Placed {
			placed = 1
		}
		dst = binary.LittleEndian.AppendUint16(dst, p.Index)
		dst = append(dst, placed, 0)
		dst = binary.LittleEndian.AppendUint32(dst, p.Segment)
		dst = binary.LittleEndian.AppendUint64(dst, p.Offset)
		dst = binary.LittleEndian.AppendUint64(dst, p.ByteSize)
	}
	dst = append(dst, r.RequestID...)
	dst = append(dst, r.Parameters...)
	dst = append(dst, r.CorrelationText...)
	return end(dst, at)
}

// ParseRequest reads a request frame into r, whose slices it uses again.
func ParseRequest(b []byte, r *Request) (err error) {
	if len(b) < requestByteSize {
		return errShort
	}
	h := ParseHeader(b)
	r.ID, r.Flags = h.ID, h.Flags
	r.CorrelationID = binary.LittleEndian.Uint64(b[16:])
	r.TimeoutMicros = binary.LittleEndian.Uint64(b[24:])
	r.Priority = binary.LittleEndian.Uint32(b[32:])
	r.SequenceFlags = binary.LittleEndian.Uint32(b[36:])
	outputs := int(binary.LittleEndian.Uint16(b[40:]))
	texts := [3]int{
		int(binary.LittleEndian.Uint16(b[42:])), int(binary.LittleEndian.Uint32(b[44:])),
		int(binary.LittleEndian.Uint16(b[48:])),
	}
	b = b[requestByteSize:]
	r.Inputs, r.Outputs, r.dims = r.Inputs[:0], r.Outputs[:0], r.dims[:0]
	for range h.Count {
		var t Tensor
		if b, r.dims, err = parseTensor(b, &t, r.dims); err != nil {
			return err
		}
		r.Inputs = append(r.Inputs, t)
	}
	if len(b) < tensorByteSize*outputs {
		return errShort
	}
	for range outputs {
		r.Outputs = append(r.Outputs, Placement{
			binary.LittleEndian.Uint16(b), b[2] == 1, binary.LittleEndian.Uint32(b[4:]),
			binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:]),
		})
		b = b[tensorByteSize:]
	}
	if len(b) != texts[0]+texts[1]+texts[2] {
		return fmt.Errorf("frame has %d bytes of text, announced %d", len(b), texts[0]+texts[1]+texts[2])
	}
	r.RequestID, b = string(b[:texts[0]]), b[texts[0]:]
	r.Parameters, b = string(b[:texts[1]]), b[texts[1]:]
	r.CorrelationText = string(b)
	return nil
}

// Response is one answer. Layout after the header:
//
//	offset width
//	16     8     when the execution began, CLOCK_MONOTONIC nanoseconds
//	24     8     when it ended
//	32     1     error code
//	33     3     zero
//	36     4     byte size of the error's message
//	40           outputs, message
type Response struct {
	ID      uint64
	Flags   uint8
	Begin   int64
	End     int64
	Code    uint8
	Message string
	Outputs []Tensor

	dims []int64
}

// Now is the clock of Begin and End, which all processes of a machine have in common.
func Now() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// AppendResponse appends the frame of r to dst.
func AppendResponse(dst []byte, r *Response) []byte {
	dst, at := begin(dst, KindResponse, r.Flags, len(r.Outputs), r.ID)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(r.Begin))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(r.End))
	dst = append(dst, r.Code, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(r.Message)))
	for i := range r.Outputs {
		dst = appendTensor(dst, &r.Outputs[i])
	}
	dst = append(dst, r.Message...)
	return end(dst, at)
}

// ParseResponse reads a response frame into r, whose slices it uses again.
func ParseResponse(b []byte, r *Response) (err error) {
	if len(b) < responseByteSize {
		return errShort
	}
	h := ParseHeader(b)
	r.ID, r.Flags = h.ID, h.Flags
	r.Begin = int64(binary.LittleEndian.Uint64(b[16:]))
	r.End = int64(binary.LittleEndian.Uint64(b[24:]))
	r.Code = b[32]
	text := int(binary.LittleEndian.Uint32(b[36:]))
	b = b[responseByteSize:]
	r.Outputs, r.dims = r.Outputs[:0], r.dims[:0]
	for range h.Count {
		var t Tensor
		if b, r.dims, err = parseTensor(b, &t, r.dims); err != nil {
			return err
		}
		r.Outputs = append(r.Outputs, t)
	}
	if len(b) != text {
		return fmt.Errorf("frame has %d bytes of text, announced %d", len(b), text)
	}
	r.Message = string(b)
	return nil
}

// AppendSegment appends the frame that announces a segment: id is its number; then 4 bytes
// access, 4 zero, 8 byte size. Its descriptor travels with the frame's first byte.
func AppendSegment(dst []byte, number uint32, access uint32, byteSize uint64) []byte {
	dst, at := begin(dst, KindSegment, 0, 0, uint64(number))
	dst = binary.LittleEndian.AppendUint32(dst, access)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint64(dst, byteSize)
	return end(dst, at)
}

// ParseSegment reads what AppendSegment wrote.
func ParseSegment(b []byte) (number, access uint32, byteSize uint64, err error) {
	if len(b) != segmentByteSize {
		return 0, 0, 0, errShort
	}
	id := ParseHeader(b).ID
	if id>>32 != 0 {
		return 0, 0, 0, fmt.Errorf("segment number %d is too large", id)
	}
	return uint32(id), binary.LittleEndian.Uint32(b[16:]), binary.LittleEndian.Uint64(b[24:]), nil
}

// AppendMark appends a frame that is a header alone: a cancel or a drop.
func AppendMark(dst []byte, kind Kind, id uint64) []byte {
	dst, at := begin(dst, kind, 0, 0, id)
	return end(dst, at)
}

// Place is where a lease begins: 4 bytes number of the segment, 4 zero, 8 offset.
type Place struct {
	Segment uint32
	Offset  uint64
}

const placeByteSize = 16

// AppendRelease appends the frame that gives leases of output segments back, fewer than 65536.
func AppendRelease(dst []byte, places []Place) []byte {
	dst, at := begin(dst, KindRelease, 0, len(places), 0)
	for _, p := range places {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(p.Segment))
		dst = binary.LittleEndian.AppendUint64(dst, p.Offset)
	}
	return end(dst, at)
}

// ParseRelease calls release for each place of a release frame.
func ParseRelease(b []byte, release func(Place)) error {
	h := ParseHeader(b)
	if b = b[HeaderByteSize:]; len(b) != placeByteSize*int(h.Count) {
		return errShort
	}
	for ; len(b) > 0; b = b[placeByteSize:] {
		release(Place{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint64(b[8:])})
	}
	return nil
}
