package grpcv2

import (
	"bytes"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/nereid-serve/nereid/host/infer"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
	"github.com/nereid-serve/nereid/tensor"
)

func sample() *inferencepb.ModelInferRequest {
	text := func(s string) *inferencepb.InferParameter {
		return &inferencepb.InferParameter{ParameterChoice: &inferencepb.InferParameter_StringParam{StringParam: s}}
	}
	number := func(n int64) *inferencepb.InferParameter {
		return &inferencepb.InferParameter{ParameterChoice: &inferencepb.InferParameter_Int64Param{Int64Param: n}}
	}
	return &inferencepb.ModelInferRequest{
		ModelName: "m", ModelVersion: "3", Id: "an id",
		Parameters: map[string]*inferencepb.InferParameter{"sequence_id": number(7), "own": text("x")},
		Inputs: []*inferencepb.ModelInferRequest_InferInputTensor{
			{Name: "A", Datatype: "FP32", Shape: []int64{2, 3}},
			{Name: "B", Datatype: "INT8", Shape: []int64{4}, Parameters: map[string]*inferencepb.InferParameter{
				"shared_memory_region": text("r"), "shared_memory_byte_size": number(4), "shared_memory_offset": number(8),
			}},
			{Name: "C", Datatype: "BYTES", Shape: []int64{1}},
		},
		Outputs:          []*inferencepb.ModelInferRequest_InferRequestedOutputTensor{{Name: "O"}},
		RawInputContents: [][]byte{bytes.Repeat([]byte("0123"), 6), []byte("\x01\x00\x00\x00z")},
	}
}

// cut lays a message out over buffers of n bytes, as the transport may.
func cut(b []byte, n int) mem.BufferSlice {
	var out mem.BufferSlice
	for len(b) > 0 {
		k := min(n, len(b))
		out = append(out, mem.SliceBuffer(b[:k]))
		b = b[k:]
	}
	return out
}

func TestUnmarshalIsTheSameHoweverTheMessageIsCut(t *testing.T) {
	b, err := proto.Marshal(sample())
	if err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= len(b); n++ {
		var r inferRequest
		if err := r.unmarshal(cut(b, n)); err != nil {
			t.Fatalf("%d: %v", n, err)
		}
		if err := r.settle(); err != nil {
			t.Fatalf("%d: %v", n, err)
		}
		q := &r.request
		if r.model != "m" || r.version != "3" || q.ID != "an id" || q.CorrelationID != 7 || q.Parameters != `{"own":"x"}` || len(q.Inputs) != 3 || len(q.Outputs) != 1 {
			t.Fatalf("%d: %+v", n, r)
		}
		if in := q.Inputs[1]; in.Region == nil || *in.Region != (infer.RegionRef{Name: "r", Offset: 8, ByteSize: 4}) {
			t.Fatalf("%d: %+v", n, in)
		}
		places := [][]byte{make([]byte, 24), nil, make([]byte, 5)}
		if err := r.fill(func(i int) []byte { return places[i] }); err != nil {
			t.Fatal(err)
		}
		if string(places[0]) != strings.Repeat("0123", 6) || string(places[2]) != "\x01\x00\x00\x00z" {
			t.Fatalf("%d: %q", n, places)
		}
		r.free()
	}
}

func TestMarshal(t *testing.T) {
	for _, sizes := range [][]int{{3, 0}, {borrowFrom, 5}, {borrowFrom + 1, borrowFrom * 2}, {}} {
		closed := 0
		response := &infer.Response{Release: func() { closed++ }}
		var want [][]byte
		for i, n := range sizes {
			data := bytes.Repeat([]byte{byte(i + 1)}, n)
			want = append(want, data)
			response.Outputs = append(response.Outputs, infer.OutputTensor{Name: "O", DataType: tensor.Uint8, Shape: tensor.Shape{int64(n)}, Data: data})
		}
		r := &inferResponse{model: "m", id: "i", version: 12, response: response, copied: &atomic.Uint64{}}
		buffers := r.marshal()
		out := &inferencepb.ModelInferResponse{}
		if err := proto.Unmarshal(buffers.Materialize(), out); err != nil {
			t.Fatal(err)
		}
		if out.ModelName != "m" || out.Id != "i" || out.ModelVersion != "12" || len(out.Outputs) != len(sizes) {
			t.Errorf("%v: %v", sizes, out)
		}
		for i := range want {
			if !bytes.Equal(out.RawOutputContents[i], want[i]) || out.Outputs[i].Shape[0] != int64(sizes[i]) && sizes[i] != 0 {
				t.Errorf("%v: output %d differs", sizes, i)
			}
		}
		buffers.Free()
		if closed != 1 {
			t.Errorf("%v: the stub's memory was given back %d times", sizes, closed)
		}
	}
}

// FuzzUnmarshal: whatever arrives ends as a request or an error; what protobuf itself takes
// for a request with plain contents, we do too.
func FuzzUnmarshal(f *testing.F) {
	b, _ := proto.Marshal(sample())
	f.Add(b, 3)
	f.Add(b[:len(b)-3], 100)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		var r inferRequest
		err := r.unmarshal(cut(b, 1+(n&0xff)))
		defer r.free()
		if err == nil && r.settle() == nil {
			for i := range r.request.Inputs {
				if r.request.Inputs[i].ByteSize > uint64(2*len(b)+8*len(b)) {
					t.Fatal("an input larger than its message")
				}
			}
		}
	})
}
