package sdk

import (
	"unsafe"

	"github.com/nereid-serve/nereid/tensor"
)

// kindOf is the datatype whose elements E has the layout of, and their size in bytes.
func kindOf[E Element]() (tensor.DataType, int) {
	var zero E
	size := int(unsafe.Sizeof(zero))
	switch any(zero).(type) {
	case bool:
		return tensor.Bool, size
	case uint8:
		return tensor.Uint8, size
	case uint16:
		return tensor.Uint16, size
	case uint32:
		return tensor.Uint32, size
	case uint64:
		return tensor.Uint64, size
	case int8:
		return tensor.Int8, size
	case int16:
		return tensor.Int16, size
	case int32:
		return tensor.Int32, size
	case int64:
		return tensor.Int64, size
	case float32:
		return tensor.FP32, size
	case float64:
		return tensor.FP64, size
	}
	return tensor.Invalid, size
}

// viewUnsafe reinterprets bytes as elements; false where they are not aligned for E.
func viewUnsafe[E Element](data []byte, size int) ([]E, bool) {
	if len(data) < size {
		return nil, true
	}
	p := unsafe.Pointer(unsafe.SliceData(data))
	if uintptr(p)%uintptr(size) != 0 {
		return nil, false
	}
	return unsafe.Slice((*E)(p), len(data)/size), true
}

// within tells whether an address lies in data.
func within(address uintptr, data []byte) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	return address >= start && address < start+uintptr(len(data))
}
