package wire_test

import (
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/nereid-serve/nereid/internal/wire"
	"github.com/nereid-serve/nereid/tensor"
)

var update = flag.Bool("update", false, "write testdata/vectors.json anew")

// vector is one frame in both forms; stubs/python's tests read the same file.
type vector struct {
	Name     string
	Hex      string
	Request  *wire.Request  `json:",omitempty"`
	Response *wire.Response `json:",omitempty"`
	Segment  []uint64       `json:",omitempty"` // number, access, byte size
	Release  []wire.Place   `json:",omitempty"`
}

func vectors() []vector {
	requests := []wire.Request{
		{ID: 1, Flags: wire.FlagAllOutputs},
		{
			ID: 1<<63 + 5, Flags: wire.FlagMore, CorrelationID: 42, TimeoutMicros: 1_000_000, Priority: 3, SequenceFlags: 3,
			RequestID: "id", Parameters: `{"k":"v"}`, CorrelationText: "größe",
			Inputs: []wire.Tensor{
				{Index: 0, DataType: tensor.FP32, Segment: 1 << 30, Offset: 64, ByteSize: 24, Shape: tensor.Shape{2, 3}},
				{Index: 1, DataType: tensor.Bytes, Segment: 7, Offset: 1<<40 + 1, ByteSize: 9, Shape: tensor.Shape{}},
			},
			Outputs: []wire.Placement{{Index: 1}, {Index: 0, Placed: true, Segment: 7, Offset: 4096, ByteSize: 24}},
		},
	}
	responses := []wire.Response{
		{ID: 9, Flags: wire.FlagFinal, Begin: 100, End: 250, Outputs: []wire.Tensor{
			{Index: 2, DataType: tensor.Int64, Segment: wire.FirstOutputSegment, Offset: 128, ByteSize: 8, Shape: tensor.Shape{1}},
			{Index: 0, DataType: tensor.BF16, Segment: wire.FirstOutputSegment + 1, ByteSize: 12, Shape: tensor.Shape{1, 2, 3}},
		}},
		{ID: 10, Flags: wire.FlagFinal | wire.FlagError | wire.FlagFailed, Begin: 1, End: 2, Code: 4, Message: "größer"},
		{ID: 11, Flags: wire.FlagFinal | wire.FlagKeepsInputs},
	}
	var out []vector
	for i := range requests {
		out = append(out, vector{Name: "request", Request: &requests[i], Hex: hex.EncodeToString(wire.AppendRequest(nil, &requests[i]))})
	}
	for i := range responses {
		out = append(out, vector{Name: "response", Response: &responses[i], Hex: hex.EncodeToString(wire.AppendResponse(nil, &responses[i]))})
	}
	places := []wire.Place{{Segment: wire.FirstOutputSegment, Offset: 64}, {Segment: wire.FirstOutputSegment + 3, Offset: 1 << 33}}
	return append(out,
		vector{Name: "segment", Segment: []uint64{wire.FirstOutputSegment, wire.AccessOutput, 1 << 20}, Hex: hex.EncodeToString(wire.AppendSegment(nil, wire.FirstOutputSegment, wire.AccessOutput, 1<<20))},
		vector{Name: "release", Release: places, Hex: hex.EncodeToString(wire.AppendRelease(nil, places))},
		vector{Name: "cancel", Hex: hex.EncodeToString(wire.AppendMark(nil, wire.KindCancel, 77))},
	)
}

func TestVectors(t *testing.T) {
	const path = "testdata/vectors.json"
	if *update {
		text, err := json.MarshalIndent(vectors(), "", " ")
		if err == nil {
			err = os.WriteFile(path, append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var want []vector
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	options := []cmp.Option{cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(wire.Request{}, wire.Response{})}
	if diff := cmp.Diff(want, vectors(), options...); diff != "" {
		t.Errorf("frames differ from the published vectors: the layout has changed\n%s", diff)
	}
	for _, v := range want {
		frame, err := hex.DecodeString(v.Hex)
		if err != nil {
			t.Fatal(err)
		}
		if h := wire.ParseHeader(frame); int(h.ByteSize) != len(frame) {
			t.Errorf("%s says it has %d bytes, has %d", v.Name, h.ByteSize, len(frame))
		}
		switch {
		case v.Request != nil:
			var got wire.Request
			if err := wire.ParseRequest(frame, &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(v.Request, &got, options...); diff != "" {
				t.Error(diff)
			}
		case v.Response != nil:
			var got wire.Response
			if err := wire.ParseResponse(frame, &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(v.Response, &got, options...); diff != "" {
				t.Error(diff)
			}
		case v.Segment != nil:
			number, access, byteSize, err := wire.ParseSegment(frame)
			if err != nil || cmp.Diff(v.Segment, []uint64{uint64(number), uint64(access), byteSize}) != "" {
				t.Errorf("segment %d %d %d, %v", number, access, byteSize, err)
			}
		case v.Release != nil:
			var got []wire.Place
			if err := wire.ParseRelease(frame, func(p wire.Place) { got = append(got, p) }); err != nil || cmp.Diff(v.Release, got) != "" {
				t.Errorf("release %v, %v", got, err)
			}
		}
	}
}

// FuzzFrames: whatever a peer sends, parsing ends with a frame or an error, and a frame that
// parses is written again as the same bytes.
func FuzzFrames(f *testing.F) {
	for _, v := range vectors() {
		frame, _ := hex.DecodeString(v.Hex)
		f.Add(frame)
		f.Add(frame[:len(frame)-1])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < wire.HeaderByteSize {
			return
		}
		var request wire.Request
		if wire.ParseRequest(b, &request) == nil {
			var again wire.Request
			if err := wire.ParseRequest(wire.AppendRequest(nil, &request), &again); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(request, again, cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(wire.Request{})); diff != "" {
				t.Fatal(diff)
			}
		}
		var response wire.Response
		if wire.ParseResponse(b, &response) == nil {
			var again wire.Response
			if err := wire.ParseResponse(wire.AppendResponse(nil, &response), &again); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(response, again, cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(wire.Response{})); diff != "" {
				t.Fatal(diff)
			}
		}
		_, _, _, _ = wire.ParseSegment(b)
		_ = wire.ParseRelease(b, func(wire.Place) {})
	})
}
