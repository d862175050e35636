// Package backend is one running backend as the host sees it: the instances of a stub, their
// data channels, and the requests they have.
//
// Threads: Execute and Cancel may be called from any goroutine; each instance has one
// goroutine that reads answers. Lock order: sending before mu; neither is held while the
// scheduler or a request is called. mu is never held while a frame is sent: a stub that does
// not read its channel until we have read its answers must find a reader.
package backend

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/host/stats"
	"github.com/nereid-serve/nereid/internal/channel"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/internal/wire"
	"github.com/nereid-serve/nereid/tensor"
)

// OutputSpec describes an output of the model. As in Triton, the datatype is the backend's word.
type OutputSpec struct {
	Name string
	// Shape turns the shape that the backend gave into the one that clients see, or says
	// why the model's configuration forbids it.
	Shape func(backendShape tensor.Shape) (tensor.Shape, error)
}

// Events is who hears what an instance does.
type Events interface {
	// Answered says that the instance executed r for took, before r is completed.
	Answered(r *infer.Request, took time.Duration)
	// Ended says, once, that the instance's channel ended. The requests that it had not
	// begun come back; those that it had are completed by Fail.
	Ended(i *Instance, unbegun, begun []*infer.Request, err error)
}

// maxHeldReleases bounds how many leases of output memory wait for the next request to
// take their release along.
const maxHeldReleases = 32

// Instance is one instance of a stub.
type Instance struct {
	Name    string
	conn    *channel.Conn
	outputs []OutputSpec
	events  Events
	memory  *outputMemory

	// sending is held from the moment a request is appended to pending until its frame is
	// sent: frames leave in the order of pending, on which the crash rules rest.
	sending   sync.Mutex
	next      uint64
	announced map[uint32]bool
	buf       []byte

	mu       sync.Mutex
	pending  []*infer.Request // in the order they were sent
	releases []wire.Place
	kept     map[uint64]func() // by request: gives its input memory back
	closed   bool
	lastDone time.Time
}

// NewInstance takes our end of a data channel and begins to read from it.
func NewInstance(name string, file *os.File, outputs []OutputSpec, events Events) (*Instance, error) {
	conn, err := channel.New(file)
	if err != nil {
		return nil, err
	}
	i := &Instance{
		Name: name, conn: conn, outputs: outputs, events: events, announced: map[uint32]bool{}, kept: map[uint64]func(){},
		memory: &outputMemory{segments: map[uint32]*shm.Mapping{}, users: 1},
	}
	go i.read()
	return i, nil
}

// Execute sends a request. Whatever happens to the instance, the request is heard of again:
// through Events, or by its response.
func (i *Instance) Execute(r *infer.Request) {
	i.sending.Lock()
	i.next++
	r.Frame.ID = i.next
	r.Sent = time.Now()
	i.mu.Lock()
	if i.closed {
		i.mu.Unlock()
		i.sending.Unlock()
		i.events.Ended(i, []*infer.Request{r}, nil, io.EOF)
		return
	}
	i.pending = append(i.pending, r)
	i.buf = i.takeReleases(i.buf[:0])
	i.mu.Unlock()
	err := i.announce(r)
	if err == nil {
		i.buf = wire.AppendRequest(i.buf, &r.Frame)
		err = i.conn.Send(i.buf)
	}
	i.sending.Unlock()
	if err != nil {
		i.conn.Close() // the reader tells the rest
	}
}

// takeReleases appends the frame of the releases that wait. The caller holds mu.
func (i *Instance) takeReleases(dst []byte) []byte {
	if len(i.releases) > 0 {
		dst = wire.AppendRelease(dst, i.releases)
		i.releases = i.releases[:0]
	}
	return dst
}

// announce sends the descriptors of segments that the stub sees for the first time. The
// caller holds sending.
func (i *Instance) announce(r *infer.Request) error {
	if l := r.Lease(); !l.Zero() && !i.announced[l.Segment()] {
		m := l.Mapping()
		if m == nil {
			return errors.New("input arena is closed")
		}
		i.announced[l.Segment()] = true
		if err := i.conn.SendFD(wire.AppendSegment(nil, l.Segment(), wire.AccessInput, uint64(len(m.Data()))), m.FD()); err != nil {
			return err
		}
	}
	for _, g := range r.Regions {
		if !i.announced[g.Number] {
			i.announced[g.Number] = true
			if err := i.conn.SendFD(wire.AppendSegment(nil, g.Number, wire.AccessRegion, g.MapByteSize()), g.FD()); err != nil {
				return err
			}
		}
	}
	return nil
}

// Cancel tells the stub that nobody waits for r any more.
func (i *Instance) Cancel(r *infer.Request) {
	i.sending.Lock()
	defer i.sending.Unlock()
	i.mu.Lock()
	has := slices.Contains(i.pending, r)
	i.mu.Unlock()
	if has {
		_ = i.conn.Send(wire.AppendMark(nil, wire.KindCancel, r.Frame.ID))
	}
}

// Forget tells the stub that a region ended.
func (i *Instance) Forget(number uint32) {
	i.sending.Lock()
	defer i.sending.Unlock()
	if i.announced[number] {
		delete(i.announced, number)
		_ = i.conn.Send(wire.AppendMark(nil, wire.KindDrop, uint64(number)))
	}
}

// CloseWrite tells the stub that no more requests come; it answers those it has.
func (i *Instance) CloseWrite() { _ = i.conn.CloseWrite() }

// Close ends the channel. Output memory stays until the last response is closed.
func (i *Instance) Close() { _ = i.conn.Close() }

func (i *Instance) read() {
	var response wire.Response
	var err error
	for {
		var frame []byte
		if frame, err = i.conn.Next(); err != nil {
			break
		}
		switch h := wire.ParseHeader(frame); h.Kind {
		case wire.KindResponse:
			if err = wire.ParseResponse(frame, &response); err == nil {
				err = i.complete(&response)
			}
		case wire.KindSegment:
			err = i.importSegment(frame)
		case wire.KindRelease:
			i.letGo(h.ID)
		default:
			err = fmt.Errorf("stub sent a frame of unknown kind %d", h.Kind)
		}
		if err != nil {
			break
		}
	}
	i.conn.Close()
	i.conn.CloseFiles()
	i.mu.Lock()
	i.closed = true
	var begun, unbegun []*infer.Request
	if len(i.pending) > 0 {
		begun, unbegun = i.pending[:1], i.pending[1:]
	}
	i.pending = nil
	kept := i.kept
	i.kept = nil
	i.mu.Unlock()
	for _, free := range kept {
		free()
	}
	i.memory.release()
	i.events.Ended(i, unbegun, begun, err)
}

func (i *Instance) importSegment(frame []byte) error {
	number, access, byteSize, err := wire.ParseSegment(frame)
	if err != nil {
		return err
	}
	file, err := i.conn.TakeFile()
	if err != nil {
		return err
	}
	if access != wire.AccessOutput || number < wire.FirstOutputSegment {
		file.Close()
		return fmt.Errorf("stub announced segment %d with access %d", number, access)
	}
	mapping, err := shm.Import(file, byteSize, false)
	if err != nil {
		return err
	}
	if i.memory.segments[number] != nil || len(i.memory.segments) > 4096 {
		mapping.Close()
		return fmt.Errorf("stub announced segment %d twice, or too many", number)
	}
	i.memory.segments[number] = mapping
	return nil
}

// complete checks a response and hands it over. An error means that the stub does not
// keep to the protocol: its stream can't be trusted any more.
func (i *Instance) complete(w *wire.Response) error {
	received := time.Now()
	i.mu.Lock()
	at := -1
	for k, p := range i.pending {
		if p.Frame.ID == w.ID {
			at = k
			break
		}
	}
	if at < 0 {
		i.mu.Unlock()
		return fmt.Errorf("stub answered request %d, which it does not have", w.ID)
	}
	r := i.pending[at]
	i.pending = append(i.pending[:at], i.pending[at+1:]...)
	previous := i.lastDone
	i.lastDone = received
	i.mu.Unlock()

	if w.Flags&wire.FlagKeepsInputs != 0 {
		i.keep(w.ID, r)
	}
	out := &infer.Response{Executed: true}
	var took time.Duration
	out.Spans, took = spans(r, w, previous, received)
	if w.Flags&wire.FlagError != 0 {
		code := errcode.Code(w.Code)
		if !code.Valid() {
			code = errcode.Internal
		}
		out.Err = errcode.Errorf(code, "%s", w.Message)
		out.Failed = w.Flags&wire.FlagFailed != 0
		i.give(w.Outputs)
	} else if err := i.collect(r, w, out); err != nil {
		out.Outputs, out.Err = nil, errcode.Errorf(errcode.Internal, "%w", err)
		i.give(w.Outputs)
	}
	i.events.Answered(r, took)
	r.Complete(out)
	return nil
}

// keep takes over the input memory of a request whose author still refers to it.
func (i *Instance) keep(id uint64, r *infer.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.kept[id] = r.TakeMemory()
}

// letGo gives it back.
func (i *Instance) letGo(id uint64) {
	i.mu.Lock()
	free := i.kept[id]
	delete(i.kept, id)
	i.mu.Unlock()
	if free != nil {
		free()
	}
}

// spans turns the stub's two moments, which are its own word, into the four spans of a request.
func spans(r *infer.Request, w *wire.Response, previous, received time.Time) (stats.Spans, time.Duration) {
	began := r.Sent
	if previous.After(began) {
		began = previous // until then the instance was busy with the request before
	}
	window := received.Sub(began)
	infer := min(max(time.Duration(w.End-w.Begin), 0), window)
	ago := time.Duration(wire.Now() - w.End) // since the execution ended
	output := min(max(ago, 0), window-infer)
	return stats.Spans{
		Queue: max(began.Sub(r.Queued), 1), ComputeInput: max(window-infer-output, 1),
		ComputeInfer: max(infer, 1), ComputeOutput: max(output, 1),
	}, infer
}

// collect makes the outputs of a response. What the stub says is checked here, once, against
// the model's configuration, the placements asked for and the segments it announced.
func (i *Instance) collect(r *infer.Request, w *wire.Response, out *infer.Response) error {
	out.Outputs = make([]infer.OutputTensor, 0, len(w.Outputs))
	var places, unwanted []wire.Place
	for k := range w.Outputs {
		t := &w.Outputs[k]
		if int(t.Index) >= len(i.outputs) {
			return fmt.Errorf("backend answered with output %d of a model that has %d", t.Index, len(i.outputs))
		}
		spec := &i.outputs[t.Index]
		for _, o := range out.Outputs {
			if o.Name == spec.Name {
				return fmt.Errorf("backend answered with output '%s' twice", spec.Name)
			}
		}
		elements, ok := t.Shape.Elements()
		if !ok {
			return fmt.Errorf("output '%s' has shape %s", spec.Name, t.Shape)
		}
		if size, fixed := tensor.ByteSize(t.DataType, t.Shape); fixed && uint64(size) != t.ByteSize || !fixed && (t.DataType != tensor.Bytes || uint64(elements) > t.ByteSize/4) {
			return fmt.Errorf("output '%s' of datatype %s and shape %s has %d bytes", spec.Name, t.DataType, t.Shape, t.ByteSize)
		}
		shape, err := spec.Shape(t.Shape)
		if err != nil {
			return err
		}
		o := infer.OutputTensor{Name: spec.Name, DataType: t.DataType, Shape: shape}
		wanted, placed := placement(r, t.Index)
		switch {
		case !wanted:
			if t.Segment >= wire.FirstOutputSegment {
				unwanted = append(unwanted, wire.Place{Segment: t.Segment, Offset: t.Offset})
			}
			continue
		case placed != nil:
			// The stub has written to the client's region; what it says of where is not used.
			o.Region = placed
		case t.ByteSize > 0:
			m := i.memory.segments[t.Segment]
			if m == nil {
				return fmt.Errorf("output '%s' lies in segment %d, which the backend has not announced", spec.Name, t.Segment)
			}
			end, ok := tensor.End(t.Offset, t.ByteSize, uint64(len(m.Data())))
			if !ok {
				return fmt.Errorf("output '%s': %d bytes at offset %d pass the end of a segment of %d bytes", spec.Name, t.ByteSize, t.Offset, len(m.Data()))
			}
			o.Data = m.Data()[t.Offset:end:end]
			places = append(places, wire.Place{Segment: t.Segment, Offset: t.Offset})
		}
		out.Outputs = append(out.Outputs, o)
	}
	if len(unwanted) > 0 {
		i.release(unwanted)
	}
	if len(places) > 0 {
		i.memory.use()
		out.Release = func() {
			i.release(places)
			i.memory.release()
		}
	}
	return nil
}

// placement tells whether the client wants an output, and into which region, if any.
func placement(r *infer.Request, index uint16) (wanted bool, _ *infer.RegionRef) {
	for k := range r.Frame.Outputs {
		if p := &r.Frame.Outputs[k]; p.Index == index {
			if p.Placed {
				return true, r.Outputs[k].Region
			}
			return true, nil
		}
	}
	return r.Frame.Flags&wire.FlagAllOutputs != 0, nil
}

// give releases the places of a response that is not used.
func (i *Instance) give(outputs []wire.Tensor) {
	var places []wire.Place
	for k := range outputs {
		if outputs[k].Segment >= wire.FirstOutputSegment {
			places = append(places, wire.Place{Segment: outputs[k].Segment, Offset: outputs[k].Offset})
		}
	}
	if len(places) > 0 {
		i.release(places)
	}
}

// release lets the stub use output memory again. The message waits for the next request to
// take it along, as waking the stub costs more than the memory is worth; many are sent at
// once, unless somebody is sending: that one, or the next, takes them.
func (i *Instance) release(places []wire.Place) {
	i.mu.Lock()
	if i.closed {
		i.mu.Unlock()
		return
	}
	i.releases = append(i.releases, places...)
	many := len(i.releases) >= maxHeldReleases
	i.mu.Unlock()
	if many && i.sending.TryLock() {
		i.mu.Lock()
		frame := i.takeReleases(nil)
		i.mu.Unlock()
		if frame != nil {
			_ = i.conn.Send(frame)
		}
		i.sending.Unlock()
	}
}

// outputMemory has the output segments of a stub's instance. It is unmapped when the
// instance has ended and no response uses it.
type outputMemory struct {
	segments map[uint32]*shm.Mapping // the reading goroutine's alone until the end

	mu    sync.Mutex
	users int
}

func (m *outputMemory) use() {
	m.mu.Lock()
	m.users++
	m.mu.Unlock()
}

func (m *outputMemory) release() {
	m.mu.Lock()
	m.users--
	last := m.users == 0
	m.mu.Unlock()
	if last {
		for _, s := range m.segments {
			s.Close()
		}
	}
}
