// Package sdktest drives a backend in a test, without a server, and holds the protocol suite
// that every stub must pass.
//
//	d := sdktest.New(t, backend{}, `{"input":[...],"output":[...]}`)
//	out, err := d.Infer(sdktest.Input{Name: "INPUT0", DataType: tensor.FP32, Shape: tensor.Shape{2}, Data: bytes})
package sdktest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/channel"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/internal/wire"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
	"github.com/nereid-serve/nereid/sdk"
	"github.com/nereid-serve/nereid/tensor"
)

// Loader is a stub seen from the host: Go's, Python's, or another language's.
type Loader interface {
	Load(ctx context.Context, request *backendpb.LoadRequest, channels []*os.File) error
	Unload(ctx context.Context) error
}

// Input is one input of a request.
type Input struct {
	Name     string
	DataType tensor.DataType
	Shape    tensor.Shape
	Data     []byte
}

// Output is one output of a response; its bytes are a copy.
type Output struct {
	DataType tensor.DataType
	Shape    tensor.Shape
	Data     []byte
}

// Driver plays the host towards a stub with one instance. Its methods are for one goroutine.
type Driver struct {
	tb       testing.TB
	conn     *channel.Conn
	loader   Loader
	inputs   []string
	outputs  []string
	arena    *arena.Arena
	known    map[uint32]bool
	segments map[uint32]*shm.Mapping
	next     uint64
	closed   bool
}

// New loads a model of the backend in the test's own process. config is the model's
// configuration as JSON; a name is filled in. The model ends with the test.
func New(tb testing.TB, b sdk.Backend, config string) *Driver {
	tb.Helper()
	d, err := Load(tb, sdk.NewStub(b), config, tb.TempDir(), "")
	if err != nil {
		tb.Fatal(err)
	}
	return d
}

// Load loads a model into any stub. Folders are the model's and the version's; versionFolder
// may be empty. The error is the stub's reason.
func Load(tb testing.TB, l Loader, config, folder, versionFolder string) (*Driver, error) {
	tb.Helper()
	var parsed sdk.Config
	if err := json.Unmarshal([]byte(config), &parsed); err != nil {
		tb.Fatalf("configuration: %v", err)
	}
	ours, theirs, err := channel.Pair()
	if err != nil {
		tb.Fatal(err)
	}
	conn, err := channel.New(ours)
	if err != nil {
		tb.Fatal(err)
	}
	d := &Driver{
		tb: tb, conn: conn, loader: l, known: map[uint32]bool{}, segments: map[uint32]*shm.Mapping{},
		arena: arena.New("sdktest input", shm.InputSeals, 1<<30, 1<<28),
	}
	for _, in := range parsed.Inputs {
		d.inputs = append(d.inputs, in.Name)
	}
	for _, out := range parsed.Outputs {
		d.outputs = append(d.outputs, out.Name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err = l.Load(ctx, &backendpb.LoadRequest{
		ModelName: "model", ModelVersion: 1, ModelDirectory: folder, VersionDirectory: versionFolder, ModelConfigJson: config,
		OutputByteSizeLimit: 1 << 26, Instances: []*backendpb.Instance{{Name: "model_0_0", Kind: "KIND_CPU"}},
	}, []*os.File{theirs})
	if err != nil {
		d.release()
		return nil, err
	}
	tb.Cleanup(d.Close)
	return d, nil
}

// Close ends the model, as the host does: it shuts its side of the channel and unloads.
func (d *Driver) Close() {
	if d.closed {
		return
	}
	d.closed = true
	_ = d.conn.CloseWrite()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := d.loader.Unload(ctx); err != nil {
		d.tb.Errorf("unload: %v", err)
	}
	d.release()
}

func (d *Driver) release() {
	d.conn.Close()
	d.conn.CloseFiles()
	d.arena.Close()
	for _, s := range d.segments {
		s.Close()
	}
}

// Infer runs one request for all outputs and returns them by name. The error has the code
// that the backend gave it (package errcode).
func (d *Driver) Infer(inputs ...Input) (map[string]Output, error) {
	d.tb.Helper()
	r := wire.Request{Flags: wire.FlagAllOutputs}
	response, err := d.run(&r, inputs)
	if err != nil {
		return nil, err
	}
	return d.take(response)
}

// Begin sends a request without inputs; the returned function waits for its answer. Cancel
// tells the stub meanwhile that nobody waits for it.
func (d *Driver) Begin(id string) (answer func() error) {
	d.tb.Helper()
	d.next++
	if err := d.conn.Send(wire.AppendRequest(nil, &wire.Request{ID: d.next, RequestID: id, Flags: wire.FlagAllOutputs})); err != nil {
		d.tb.Fatal(err)
	}
	return func() error {
		response, err := d.receive()
		if err == nil {
			_, err = d.take(response)
		}
		return err
	}
}

// Cancel takes back the request sent last, as the host does when its client has gone.
func (d *Driver) Cancel() {
	if err := d.conn.Send(wire.AppendMark(nil, wire.KindCancel, d.next)); err != nil {
		d.tb.Fatal(err)
	}
}

func index(names []string, name string) uint16 {
	for i, n := range names {
		if n == name {
			return uint16(i)
		}
	}
	return 1<<16 - 1
}

// run sends a request and waits for its response.
func (d *Driver) run(r *wire.Request, inputs []Input) (*wire.Response, error) {
	d.next++
	r.ID = d.next
	for _, in := range inputs {
		t := wire.Tensor{Index: index(d.inputs, in.Name), DataType: in.DataType, Shape: in.Shape, ByteSize: uint64(len(in.Data))}
		if len(in.Data) > 0 {
			lease, err := d.arena.Lease(uint64(len(in.Data)))
			if err != nil {
				return nil, err
			}
			defer lease.Release()
			copy(lease.Data(), in.Data)
			t.Segment, t.Offset = lease.Segment(), lease.Offset()
			if err := d.announce(lease.Segment(), wire.AccessInput, lease.Mapping()); err != nil {
				return nil, err
			}
		}
		r.Inputs = append(r.Inputs, t)
	}
	if err := d.conn.Send(wire.AppendRequest(nil, r)); err != nil {
		return nil, err
	}
	return d.receive()
}

func (d *Driver) announce(number, access uint32, m *shm.Mapping) error {
	if d.known[number] {
		return nil
	}
	d.known[number] = true
	return d.conn.SendFD(wire.AppendSegment(nil, number, access, uint64(len(m.Data()))), m.FD())
}

func (d *Driver) receive() (*wire.Response, error) {
	for {
		frame, err := d.conn.Next()
		if err != nil {
			return nil, fmt.Errorf("the stub's channel ended: %w", err)
		}
		switch h := wire.ParseHeader(frame); h.Kind {
		case wire.KindResponse:
			response := &wire.Response{}
			return response, wire.ParseResponse(frame, response)
		case wire.KindSegment:
			number, access, byteSize, err := wire.ParseSegment(frame)
			if err != nil {
				return nil, err
			}
			file, err := d.conn.TakeFile()
			if err != nil {
				return nil, err
			}
			if access != wire.AccessOutput || number < wire.FirstOutputSegment || d.segments[number] != nil {
				file.Close()
				return nil, fmt.Errorf("stub announced segment %d with access %d", number, access)
			}
			if d.segments[number], err = shm.Import(file, byteSize, false); err != nil {
				return nil, err
			}
		case wire.KindRelease:
		default:
			return nil, fmt.Errorf("stub sent a frame of kind %d", h.Kind)
		}
	}
}

// take copies the outputs of a response and gives their memory back.
func (d *Driver) take(response *wire.Response) (map[string]Output, error) {
	if response.Flags&wire.FlagError != 0 {
		return nil, errcode.Errorf(errcode.Code(response.Code), "%s", response.Message)
	}
	out := map[string]Output{}
	var places []wire.Place
	for _, t := range response.Outputs {
		if int(t.Index) >= len(d.outputs) {
			return nil, fmt.Errorf("output %d of %d", t.Index, len(d.outputs))
		}
		o := Output{DataType: t.DataType, Shape: append(tensor.Shape(nil), t.Shape...)}
		if t.ByteSize > 0 && t.Segment >= wire.FirstOutputSegment {
			m := d.segments[t.Segment]
			if m == nil {
				return nil, errors.New("output in a segment that was not announced")
			}
			end, ok := tensor.End(t.Offset, t.ByteSize, uint64(len(m.Data())))
			if !ok {
				return nil, errors.New("output passes the end of its segment")
			}
			o.Data = append(o.Data, m.Data()[t.Offset:end]...)
			places = append(places, wire.Place{Segment: t.Segment, Offset: t.Offset})
		}
		out[d.outputs[t.Index]] = o
	}
	if len(places) > 0 {
		return out, d.conn.Send(wire.AppendRelease(nil, places))
	}
	return out, nil
}
