// Package tensor has the words for tensors: datatypes, shapes, byte sizes, memory types
// and the encoding of BYTES elements. It owns no memory.
package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// DataType is the type of a tensor's elements. The values are those of
// TRITONSERVER_DataType and of the config's DataType, and travel in frames.
type DataType uint8

const (
	Invalid DataType = iota
	Bool
	Uint8
	Uint16
	Uint32
	Uint64
	Int8
	Int16
	Int32
	Int64
	FP16
	FP32
	FP64
	Bytes
	BF16
)

var dataTypes = [...]struct {
	name     string
	byteSize int64
}{
	{"INVALID", 0}, {"BOOL", 1}, {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4}, {"UINT64", 8},
	{"INT8", 1}, {"INT16", 2}, {"INT32", 4}, {"INT64", 8}, {"FP16", 2}, {"FP32", 4}, {"FP64", 8},
	{"BYTES", 0}, {"BF16", 2},
}

// String is the name on the wire, such as "FP32"; a config spells it "TYPE_FP32".
func (d DataType) String() string {
	if int(d) < len(dataTypes) {
		return dataTypes[d].name
	}
	return "INVALID"
}

// Valid tells whether d is one of the fourteen datatypes.
func (d DataType) Valid() bool { return d > Invalid && int(d) < len(dataTypes) }

// ElementByteSize is the size of one element in bytes; 0 for Bytes, whose elements vary.
func (d DataType) ElementByteSize() int64 {
	if int(d) < len(dataTypes) {
		return dataTypes[d].byteSize
	}
	return 0
}

// ParseDataType reads the name on the wire; Invalid for anything else.
func ParseDataType(name string) DataType {
	for i := 1; i < len(dataTypes); i++ {
		if dataTypes[i].name == name {
			return DataType(i)
		}
	}
	return Invalid
}

// Shape is the size of each dimension. In a model's configuration -1 stands for any size.
type Shape []int64

// String writes a shape as Triton's messages do: "[-1,16]".
func (s Shape) String() string {
	var b strings.Builder
	b.WriteByte('[')
	for i, d := range s {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(d, 10))
	}
	b.WriteByte(']')
	return b.String()
}

// Elements is the product of the dimensions: 1 for a scalar, 0 where a dimension is 0.
// ok is false for a negative dimension and for a product above 2^63-1.
func (s Shape) Elements() (n int64, ok bool) {
	n = 1
	for _, d := range s {
		if d < 0 {
			return 0, false
		}
		hi, lo := bits.Mul64(uint64(n), uint64(d))
		if hi != 0 || lo > math.MaxInt64 {
			return 0, false
		}
		n = int64(lo)
	}
	return n, true
}

// ByteSize is the size in bytes of a tensor of this datatype and shape. ok is false for
// Bytes, whose size the shape does not tell, and where Elements or the product overflows.
func ByteSize(d DataType, s Shape) (n int64, ok bool) {
	size := d.ElementByteSize()
	elements, ok := s.Elements()
	if size == 0 || !ok || elements > math.MaxInt64/size {
		return 0, false
	}
	return elements * size, true
}

// End is offset + byteSize; ok is false where that passes limit or overflows. Every bounds
// check of a buffer goes through it.
func End(offset, byteSize, limit uint64) (end uint64, ok bool) {
	end, carry := bits.Add64(offset, byteSize, 0)
	return end, carry == 0 && end <= limit
}

// MemoryType says what kind of memory a buffer lies in. Values: TRITONSERVER_MemoryType.
type MemoryType uint8

const (
	CPU MemoryType = iota
	CPUPinned
	GPU
)

func (m MemoryType) String() string {
	switch m {
	case CPU:
		return "CPU"
	case CPUPinned:
		return "CPU_PINNED"
	case GPU:
		return "GPU"
	}
	return "MemoryType(" + strconv.Itoa(int(m)) + ")"
}

// CheckBytes walks the BYTES encoding in data and checks that it holds exactly elements
// elements: each a 4-byte little-endian length and as many bytes, with nothing after the last.
func CheckBytes(data []byte, elements int64) error {
	var found int64
	for rest := data; len(rest) > 0; found++ {
		if found == elements {
			return fmt.Errorf("unexpected number of string elements %d, expecting %d", found+1, elements)
		}
		if len(rest) < 4 {
			return fmt.Errorf("incomplete string length indicator for string element %d, expecting %d bytes but only %d bytes available", found, 4, len(rest))
		}
		n := uint64(binary.LittleEndian.Uint32(rest))
		rest = rest[4:]
		if n > uint64(len(rest)) {
			return fmt.Errorf("incomplete string data for string element %d, expecting string of length %d but only %d bytes available", found, n, len(rest))
		}
		rest = rest[n:]
	}
	if found != elements {
		return fmt.Errorf("expected %d string elements, got %d", elements, found)
	}
	return nil
}

// AppendBytes appends one BYTES element to dst.
func AppendBytes(dst, element []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(element)))
	return append(dst, element...)
}

// SplitBytes returns the elements of a BYTES tensor as slices of data, at most limit of them.
// Errors are those of a data that ends inside an element.
func SplitBytes(data []byte, limit int64) ([][]byte, error) {
	var out [][]byte
	for len(data) > 0 && int64(len(out)) < limit {
		if len(data) < 4 {
			return nil, fmt.Errorf("incomplete string length indicator for string element %d", len(out))
		}
		n := uint64(binary.LittleEndian.Uint32(data))
		data = data[4:]
		if n > uint64(len(data)) {
			return nil, fmt.Errorf("incomplete string data for string element %d, expecting string of length %d but only %d bytes available", len(out), n, len(data))
		}
		out = append(out, data[:n:n])
		data = data[n:]
	}
	return out, nil
}
