package tensor_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/nereid-serve/nereid/tensor"
)

func TestDataTypes(t *testing.T) {
	sizes := map[string]int64{
		"BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
		"FP16": 2, "FP32": 4, "FP64": 8, "BYTES": 0, "BF16": 2,
	}
	for name, size := range sizes {
		d := tensor.ParseDataType(name)
		if !d.Valid() || d.String() != name || d.ElementByteSize() != size {
			t.Errorf("%s: %v %d", name, d, d.ElementByteSize())
		}
	}
	for _, name := range []string{"", "INVALID", "TYPE_FP32", "fp32", "STRING"} {
		if tensor.ParseDataType(name).Valid() {
			t.Errorf("%q is no datatype", name)
		}
	}
	if tensor.DataType(200).Valid() || tensor.DataType(200).String() != "INVALID" {
		t.Error("200 is no datatype")
	}
}

func TestByteSize(t *testing.T) {
	big := int64(math.MaxInt64)
	for _, c := range []struct {
		d    tensor.DataType
		s    tensor.Shape
		want int64
		ok   bool
	}{
		{tensor.FP32, tensor.Shape{}, 4, true}, {tensor.FP32, tensor.Shape{2, 3}, 24, true}, {tensor.Int8, tensor.Shape{0, big}, 0, true},
		{tensor.Int8, tensor.Shape{big}, big, true}, {tensor.Int16, tensor.Shape{big}, 0, false}, {tensor.Int8, tensor.Shape{1 << 32, 1 << 32}, 0, false},
		{tensor.Int8, tensor.Shape{-1}, 0, false}, {tensor.Int8, tensor.Shape{0, -1}, 0, false}, {tensor.Bytes, tensor.Shape{1}, 0, false},
	} {
		if got, ok := tensor.ByteSize(c.d, c.s); ok != c.ok || ok && got != c.want {
			t.Errorf("%s %s: %d %v", c.d, c.s, got, ok)
		}
	}
}

func TestEnd(t *testing.T) {
	for _, c := range []struct {
		offset, size, limit uint64
		ok                  bool
	}{{0, 0, 0, true}, {0, 1, 0, false}, {5, 5, 10, true}, {5, 6, 10, false}, {math.MaxUint64, 1, math.MaxUint64, false}, {math.MaxUint64, 0, math.MaxUint64, true}, {1 << 63, 1 << 63, math.MaxUint64, false}} {
		if _, ok := tensor.End(c.offset, c.size, c.limit); ok != c.ok {
			t.Errorf("%+v: %v", c, ok)
		}
	}
}

func TestBytes(t *testing.T) {
	var data []byte
	items := [][]byte{{}, []byte("a"), bytes.Repeat([]byte("x"), 300)}
	for _, i := range items {
		data = tensor.AppendBytes(data, i)
	}
	if err := tensor.CheckBytes(data, 3); err != nil {
		t.Fatal(err)
	}
	split, err := tensor.SplitBytes(data, 3)
	if err != nil || len(split) != 3 || !bytes.Equal(split[2], items[2]) {
		t.Errorf("%v %v", split, err)
	}
	for n := range len(data) {
		if tensor.CheckBytes(data[:n], 3) == nil {
			t.Errorf("cut at %d passes", n)
		}
	}
	for _, elements := range []int64{0, 2, 4, math.MaxInt64} {
		if tensor.CheckBytes(data, elements) == nil {
			t.Errorf("3 elements pass as %d", elements)
		}
	}
	if tensor.CheckBytes([]byte{0xff, 0xff, 0xff, 0xff, 1}, 1) == nil {
		t.Error("a length of 4 GiB passes in 5 bytes")
	}
}

// FuzzBytes: what CheckBytes lets pass, SplitBytes splits, and it is the same bytes again.
func FuzzBytes(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 'a'}, int64(1))
	f.Add([]byte{255, 255, 255, 255}, int64(1))
	f.Fuzz(func(t *testing.T, data []byte, elements int64) {
		if tensor.CheckBytes(data, elements) != nil {
			_, _ = tensor.SplitBytes(data, elements)
			return
		}
		split, err := tensor.SplitBytes(data, elements)
		if err != nil || int64(len(split)) != elements {
			t.Fatalf("%d elements, %v", len(split), err)
		}
		var again []byte
		for _, e := range split {
			again = tensor.AppendBytes(again, e)
		}
		if !bytes.Equal(data, again) {
			t.Fatal("not the same bytes")
		}
	})
}
