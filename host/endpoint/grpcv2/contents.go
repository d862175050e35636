package grpcv2

import (
	"encoding/binary"
	"fmt"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nereid-serve/nereid/tensor"
)

// typedContents turns InferTensorContents into the raw form of the datatype.
func typedContents(d tensor.DataType, message []byte) ([]byte, error) {
	var want protowire.Number
	wire := protowire.VarintType
	switch d {
	case tensor.Bool:
		want = 1
	case tensor.Int8, tensor.Int16, tensor.Int32:
		want = 2
	case tensor.Int64:
		want = 3
	case tensor.Uint8, tensor.Uint16, tensor.Uint32:
		want = 4
	case tensor.Uint64:
		want = 5
	case tensor.FP32:
		want, wire = 6, protowire.Fixed32Type
	case tensor.FP64:
		want, wire = 7, protowire.Fixed64Type
	case tensor.Bytes:
		want = 8
	default:
		return nil, fmt.Errorf("explicit tensor data is not supported for data-type %s; use raw_input_contents", d)
	}
	out := []byte{}
	size := d.ElementByteSize()
	add := func(v uint64) error {
		if !fits(d, v) {
			return fmt.Errorf("value %d does not fit data-type %s", int64(v), d)
		}
		out = binary.LittleEndian.AppendUint64(out, v)
		out = out[:len(out)-8+int(size)]
		return nil
	}
	err := fields(message, func(number protowire.Number, kind protowire.Type, value uint64, b []byte) error {
		switch {
		case number != want:
			return fmt.Errorf("unexpected explicit tensor data for data-type %s", d)
		case d == tensor.Bytes:
			out = tensor.AppendBytes(out, b)
			return nil
		case kind == wire:
			return add(value)
		case kind != protowire.BytesType:
			return fmt.Errorf("explicit tensor data of wire type %d", kind)
		}
		for len(b) > 0 {
			var v uint64
			n := 0
			switch wire {
			case protowire.Fixed32Type:
				var w uint32
				w, n = protowire.ConsumeFixed32(b)
				v = uint64(w)
			case protowire.Fixed64Type:
				v, n = protowire.ConsumeFixed64(b)
			default:
				v, n = protowire.ConsumeVarint(b)
			}
			if n < 0 {
				return protowire.ParseError(n)
			}
			if err := add(v); err != nil {
				return err
			}
			b = b[n:]
		}
		return nil
	})
	return out, err
}

// fits tells whether a number of the wire is one of the datatype's.
func fits(d tensor.DataType, v uint64) bool {
	switch d {
	case tensor.Bool:
		return v <= 1
	case tensor.Int8:
		return int64(v) == int64(int8(v))
	case tensor.Int16:
		return int64(v) == int64(int16(v))
	case tensor.Int32:
		return int64(v) == int64(int32(v))
	case tensor.Uint8:
		return v <= math.MaxUint8
	case tensor.Uint16:
		return v <= math.MaxUint16
	case tensor.Uint32:
		return v <= math.MaxUint32
	}
	return true
}
