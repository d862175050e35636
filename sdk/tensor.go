package sdk

import (
	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/tensor"
)

// Tensor is one input or output of a request: a name, a datatype, a shape, and bytes in
// memory that this process shares with the host or the client. It is valid until Execute
// returns.
type Tensor struct {
	Name     string
	DataType tensor.DataType
	Shape    tensor.Shape

	data    []byte
	segment uint32
	offset  uint64
	index   uint16
}

// Data is the tensor's memory: row-major, little-endian. An input must not be written to:
// the memory is read-only and a write ends the process. A client may change an input that
// lies in its own region at any time; copy what is read twice.
func (t *Tensor) Data() []byte { return t.data }

// Element is a Go type that has the layout of a datatype's element.
type Element interface {
	~bool | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~int8 | ~int16 | ~int32 | ~int64 | ~float32 | ~float64
}

// View is the tensor's memory as elements, without copying; the same rules as for Data hold.
// FP16 and BF16 are viewed as uint16. Errors: InvalidArg where E is not the datatype's type,
// or where the bytes are not aligned for it, as in a region at an odd offset.
func View[E Element](t *Tensor) ([]E, error) {
	want, size := kindOf[E]()
	ok := t.DataType == want
	if want == tensor.Uint16 {
		ok = ok || t.DataType == tensor.FP16 || t.DataType == tensor.BF16
	}
	if !ok {
		return nil, invalidf("tensor '%s' has datatype %s, viewed as %s", t.Name, t.DataType, want)
	}
	out, aligned := viewUnsafe[E](t.data, size)
	if !aligned {
		return nil, invalidf("tensor '%s' is not aligned to its element size of %d bytes", t.Name, size)
	}
	return out, nil
}

// Strings returns the elements of a BYTES tensor as slices of its memory.
// Errors: InvalidArg for another datatype, and for a tensor that is not well-formed.
func (t *Tensor) Strings() ([][]byte, error) {
	if t.DataType != tensor.Bytes {
		return nil, invalidf("tensor '%s' has datatype %s, not BYTES", t.Name, t.DataType)
	}
	elements, ok := t.Shape.Elements()
	if !ok {
		return nil, invalidf("tensor '%s' has shape %s", t.Name, t.Shape)
	}
	out, err := tensor.SplitBytes(t.data, elements)
	if err == nil && int64(len(out)) != elements {
		err = invalidf("expected %d string elements, got %d", elements, len(out))
	}
	if err != nil {
		return nil, errcode.Errorf(errcode.InvalidArg, "tensor '%s': %w", t.Name, err)
	}
	return out, nil
}
