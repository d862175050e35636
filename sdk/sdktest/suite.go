package sdktest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/internal/wire"
	"github.com/nereid-serve/nereid/tensor"
)

// SuiteConfig is the configuration of the model that the suite drives.
const SuiteConfig = `{"name":"model","backend":"suite","max_batch_size":0,"default_model_filename":"model.py",
"input":[{"name":"DATA","data_type":"TYPE_UINT8","dims":[-1]},{"name":"TEXT","data_type":"TYPE_STRING","dims":[-1]}],
"output":[{"name":"DATA_OUT","data_type":"TYPE_UINT8","dims":[-1]},{"name":"TEXT_OUT","data_type":"TYPE_STRING","dims":[-1]},
{"name":"ABOUT","data_type":"TYPE_STRING","dims":[1]}],"parameters":{}}`

// Suite holds a stub against the protocol: frames, segments, leases, regions, errors. start
// loads a model that, for each request,
//
//   - answers DATA_OUT with the bytes of DATA, where that was sent,
//   - answers TEXT_OUT with the elements of TEXT, where that was sent,
//   - answers ABOUT with one element "<request id>|<parameters>|<correlation id>",
//   - fails alone with code UNAVAILABLE and message "one" where the request id is "fail one",
//   - fails the execution with message "all" where it is "fail all".
func Suite(t *testing.T, start func(tb testing.TB) *Driver) {
	data := func(n int) Input {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i * 7)
		}
		return Input{"DATA", tensor.Uint8, tensor.Shape{int64(n)}, b}
	}
	text := func(items ...string) Input {
		var b []byte
		for _, s := range items {
			b = tensor.AppendBytes(b, []byte(s))
		}
		return Input{"TEXT", tensor.Bytes, tensor.Shape{int64(len(items))}, b}
	}
	same := func(t *testing.T, got Output, want Input) {
		t.Helper()
		if got.DataType != want.DataType || got.Shape.String() != want.Shape.String() || !bytes.Equal(got.Data, want.Data) {
			t.Fatalf("got %s %s of %d bytes, want %s %s of %d bytes", got.DataType, got.Shape, len(got.Data), want.DataType, want.Shape, len(want.Data))
		}
	}

	t.Run("sizes", func(t *testing.T) {
		d := start(t)
		for _, n := range []int{0, 1, 63, 64, 65, 4096, 4097, 1 << 20, 3 << 20} {
			out, err := d.Infer(data(n))
			if err != nil {
				t.Fatal(err)
			}
			same(t, out["DATA_OUT"], data(n))
		}
	})
	t.Run("strings", func(t *testing.T) {
		d := start(t)
		in := text("", "plain", "gr\xc3\xb6\xc3\x9fe", "\x00\xff")
		out, err := d.Infer(in)
		if err != nil {
			t.Fatal(err)
		}
		same(t, out["TEXT_OUT"], in)
	})
	t.Run("what a request carries", func(t *testing.T) {
		d := start(t)
		for _, c := range []struct {
			r    wire.Request
			want string
		}{
			{wire.Request{}, `|{}|0`},
			{wire.Request{RequestID: "an id", Parameters: `{"a":1}`, CorrelationID: 1<<64 - 1}, `an id|{"a":1}|18446744073709551615`},
			{wire.Request{CorrelationText: "a sequence"}, `|{}|a sequence`},
		} {
			c.r.Flags = wire.FlagAllOutputs
			response, err := d.run(&c.r, nil)
			if err != nil {
				t.Fatal(err)
			}
			out, err := d.take(response)
			if err != nil {
				t.Fatal(err)
			}
			same(t, out["ABOUT"], text(c.want))
			if response.Begin <= 0 || response.End < response.Begin || response.Flags != wire.FlagFinal {
				t.Errorf("begin %d, end %d, flags %d", response.Begin, response.End, response.Flags)
			}
		}
	})
	t.Run("only wanted outputs", func(t *testing.T) {
		d := start(t)
		response, err := d.run(&wire.Request{Outputs: []wire.Placement{{Index: 2}}}, []Input{data(10)})
		if err != nil {
			t.Fatal(err)
		}
		if len(response.Outputs) != 1 || response.Outputs[0].Index != 2 {
			t.Errorf("outputs %+v", response.Outputs)
		}
	})
	t.Run("errors", func(t *testing.T) {
		d := start(t)
		for _, c := range []struct {
			id   string
			code errcode.Code
			fail bool
		}{{"fail one", errcode.Unavailable, false}, {"fail all", errcode.Internal, true}} {
			response, err := d.run(&wire.Request{RequestID: c.id, Flags: wire.FlagAllOutputs}, []Input{data(100)})
			if err != nil {
				t.Fatal(err)
			}
			failed := response.Flags&wire.FlagFailed != 0
			if response.Flags&wire.FlagError == 0 || errcode.Code(response.Code) != c.code || failed != c.fail || !bytes.Contains([]byte(response.Message), []byte(c.id[5:])) {
				t.Errorf("%s: %+v", c.id, response)
			}
			if _, err := d.Infer(data(1)); err != nil {
				t.Fatalf("after it: %v", err)
			}
		}
	})
	t.Run("an execution of several requests", func(t *testing.T) {
		d := start(t)
		var frames []byte
		for i, id := range []string{"a", "fail one", "c"} {
			flags := uint8(wire.FlagAllOutputs | wire.FlagMore)
			if i == 2 {
				flags = wire.FlagAllOutputs
			}
			frames = wire.AppendRequest(frames, &wire.Request{ID: uint64(100 + i), Flags: flags, RequestID: id})
		}
		if err := d.conn.Send(frames); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			response, err := d.receive()
			if err != nil {
				t.Fatal(err)
			}
			if response.ID != uint64(100+i) || response.Flags&wire.FlagError != 0 != (i == 1) {
				t.Errorf("response %d: %+v", i, response)
			}
		}
	})
	t.Run("memory is used again", func(t *testing.T) {
		d := start(t)
		for i := range 2000 {
			if _, err := d.Infer(data(1 + i*37%20_000)); err != nil {
				t.Fatal(err)
			}
		}
		total := 0
		for _, s := range d.segments {
			total += len(s.Data())
		}
		if total > 4<<20 {
			t.Errorf("2000 small responses, one at a time, took %d bytes of segments", total)
		}
	})
	t.Run("memory that is not given back runs out", func(t *testing.T) {
		d := start(t)
		for i := 0; ; i++ {
			response, err := d.run(&wire.Request{Flags: wire.FlagAllOutputs}, []Input{data(4 << 20)})
			if err != nil {
				t.Fatal(err)
			}
			if response.Flags&wire.FlagError == 0 {
				if i > 64 {
					t.Fatal("the limit of 64 MiB was passed")
				}
				continue
			}
			if errcode.Code(response.Code) != errcode.Unavailable || !bytes.Contains([]byte(response.Message), []byte("--output-arena-byte-size")) {
				t.Errorf("response %d: %+v", i, response)
			}
			break
		}
	})
	t.Run("regions", func(t *testing.T) { suiteRegions(t, start(t), data(4096)) })
	t.Run("marks for requests that are over", func(t *testing.T) {
		d := start(t)
		frames := wire.AppendMark(nil, wire.KindCancel, 12345)
		frames = wire.AppendMark(frames, wire.KindDrop, 999)
		frames = wire.AppendRelease(frames, []wire.Place{{Segment: wire.FirstOutputSegment, Offset: 64}})
		if err := d.conn.Send(frames); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Infer(data(5)); err != nil {
			t.Fatal(err)
		}
	})
}

func suiteRegions(t *testing.T, d *Driver, in Input) {
	// A client's object, which no seal protects.
	file, err := os.OpenFile(filepath.Join(t.TempDir(), "region"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Truncate(16384); err != nil {
		t.Fatal(err)
	}
	m, err := shm.MapClient(file, 16384)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const number = 5
	if err := d.announce(number, wire.AccessRegion, m); err != nil {
		t.Fatal(err)
	}
	copy(m.Data()[100:], in.Data)
	send := func(room uint64) *wire.Response {
		t.Helper()
		r := &wire.Request{Outputs: []wire.Placement{{Index: 0, Placed: true, Segment: number, Offset: 8000, ByteSize: room}}}
		r.Inputs = []wire.Tensor{{DataType: tensor.Uint8, Shape: in.Shape, Segment: number, Offset: 100, ByteSize: 4096}}
		response, err := d.run(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	if r := send(4095); r.Flags&wire.FlagError == 0 || errcode.Code(r.Code) != errcode.Internal || !bytes.Contains([]byte(r.Message), []byte("should be at least 4096 bytes")) {
		t.Errorf("too small: %+v", r)
	}
	if !bytes.Equal(m.Data()[8000:12096], make([]byte, 4096)) {
		t.Error("a region that is too small was written to")
	}
	if r := send(4096); r.Flags != wire.FlagFinal || len(r.Outputs) != 1 || !bytes.Equal(m.Data()[8000:12096], in.Data) {
		t.Errorf("response %+v", r)
	}
	// After a drop the number may stand for another segment.
	if err := d.conn.Send(wire.AppendMark(nil, wire.KindDrop, number)); err != nil {
		t.Fatal(err)
	}
	delete(d.known, number)
	if err := d.announce(number, wire.AccessRegion, m); err != nil {
		t.Fatal(err)
	}
	if r := send(4096); r.Flags != wire.FlagFinal {
		t.Errorf("after a drop: %+v", r)
	}
}
