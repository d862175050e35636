package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"sync"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/channel"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/internal/stubproc"
	"github.com/nereid-serve/nereid/internal/wire"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
	"github.com/nereid-serve/nereid/tensor"
)

// Stub runs one model version of a backend over data channels. Serve makes one; package
// sdktest makes one in the test's own process.
type Stub struct {
	backend     Backend
	model       Model
	instances   []*instance
	inputNames  []string
	outputNames []string
	outputIndex map[string]uint16
	arena       *arena.Arena

	mu       sync.RWMutex
	segments map[uint32]*mapped
}

// mapped is a segment of the host or a client, announced on uses channels.
type mapped struct {
	*shm.Mapping
	access uint32
	uses   int
}

// NewStub makes a stub without a model.
func NewStub(b Backend) *Stub {
	return &Stub{backend: b, segments: map[uint32]*mapped{}, outputIndex: map[string]uint16{}}
}

// Load makes the model and its instances and begins to answer on the channels, which it
// takes over. It may be called once.
func (s *Stub) Load(ctx context.Context, request *backendpb.LoadRequest, channels []*os.File) error {
	config, err := parseConfig(request.GetModelConfigJson())
	if err != nil {
		return err
	}
	for _, in := range config.Inputs {
		s.inputNames = append(s.inputNames, in.Name)
	}
	for i, out := range config.Outputs {
		s.outputNames = append(s.outputNames, out.Name)
		s.outputIndex[out.Name] = uint16(i)
	}
	s.arena = arena.New("nereid output "+request.GetModelName(), shm.OutputSeals, wire.FirstOutputSegment, request.GetOutputByteSizeLimit())
	s.model, err = s.backend.LoadModel(ctx, &ModelInfo{
		Name: request.GetModelName(), Version: request.GetModelVersion(),
		Directory: request.GetModelDirectory(), VersionDirectory: request.GetVersionDirectory(),
		Config: config, BackendConfig: request.GetBackendConfig(),
	})
	if err != nil {
		return err
	}
	for i, info := range request.GetInstances() {
		author, err := s.model.NewInstance(ctx, &InstanceInfo{info.GetName(), info.GetKind(), int(info.GetDeviceId())})
		if err != nil {
			return errors.Join(fmt.Errorf("instance '%s': %w", info.GetName(), err), s.Unload(ctx))
		}
		conn, err := channel.New(channels[i])
		if err != nil {
			return errors.Join(err, closeIf(author), s.Unload(ctx))
		}
		in := &instance{
			stub: s, author: author, conn: conn, done: make(chan struct{}),
			announced: map[uint32]bool{}, executions: make(chan *execution, 64), waiting: map[uint64]*Request{},
			lent: map[wire.Place]arena.Lease{},
		}
		s.instances = append(s.instances, in)
		go in.run()
	}
	return nil
}

// Unload ends the instances, then the model. The host has closed its side of the channels;
// an execution under way is waited for until ctx ends.
func (s *Stub) Unload(ctx context.Context) error {
	var errs []error
	for _, in := range s.instances {
		select {
		case <-in.done:
			errs = append(errs, closeIf(in.author))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	errs = append(errs, closeIf(s.model))
	s.arena.Close()
	for _, m := range s.segments {
		m.Close()
	}
	return errors.Join(errs...)
}

// view is memory of a segment that the host announced.
func (s *Stub) view(segment uint32, offset, byteSize uint64) ([]byte, error) {
	s.mu.RLock()
	m := s.segments[segment]
	s.mu.RUnlock()
	if m == nil {
		return nil, errcode.Errorf(errcode.Internal, "segment %d was not announced", segment)
	}
	end, ok := tensor.End(offset, byteSize, uint64(len(m.Data())))
	if !ok {
		return nil, errcode.Errorf(errcode.Internal, "%d bytes at offset %d pass the end of segment %d, %d bytes", byteSize, offset, segment, len(m.Data()))
	}
	return m.Data()[offset:end:end], nil
}

// isRegion tells whether a segment is a client's.
func (s *Stub) isRegion(number uint32) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m := s.segments[number]
	return m != nil && m.access == wire.AccessRegion
}

func (s *Stub) announce(frame []byte, conn *channel.Conn) error {
	number, access, byteSize, err := wire.ParseSegment(frame)
	if err != nil {
		return err
	}
	file, err := conn.TakeFile()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.segments[number]; m != nil {
		m.uses++
		return file.Close()
	}
	var mapping *shm.Mapping
	if access == wire.AccessRegion {
		mapping, err = shm.MapClient(file, byteSize)
	} else {
		mapping, err = shm.Import(file, byteSize, false)
	}
	if err != nil {
		return err
	}
	s.segments[number] = &mapped{mapping, access, 1}
	return nil
}

func (s *Stub) drop(number uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.segments[number]; m != nil {
		if m.uses--; m.uses == 0 {
			delete(s.segments, number)
			m.Close()
		}
	}
}

// inClientMemory tells whether an address lies in a client's region, which the client may
// have truncated.
func (s *Stub) inClientMemory(address uintptr) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, m := range s.segments {
		if m.access == wire.AccessRegion && within(address, m.Data()) {
			return true
		}
	}
	return false
}

// instance answers on one data channel: one goroutine reads frames, one executes.
type instance struct {
	stub   *Stub
	author Instance
	conn   *channel.Conn
	done   chan struct{}

	executions chan *execution
	announced  map[uint32]bool // output segments that the host knows on this channel

	mu      sync.Mutex
	waiting map[uint64]*Request
	lent    map[wire.Place]arena.Lease
}

// execution is what the requests of one call share. left is guarded by the instance.
type execution struct {
	ctx      context.Context
	cancel   context.CancelFunc
	requests []*Request
	left     int // requests that somebody waits for
}

func (in *instance) run() {
	go in.execute()
	err := in.read()
	if err != io.EOF {
		stubproc.Log(stubproc.LevelError, fmt.Sprintf("data channel: %v", err))
	}
	close(in.executions)
}

func (in *instance) read() error {
	var batch []*Request
	for {
		frame, err := in.conn.Next()
		if err != nil {
			in.conn.CloseFiles()
			return err
		}
		switch h := wire.ParseHeader(frame); h.Kind {
		case wire.KindRequest:
			r := &Request{instance: in}
			if err := wire.ParseRequest(frame, &r.frame); err != nil {
				return err
			}
			if batch = append(batch, r); r.frame.Flags&wire.FlagMore == 0 {
				in.executions <- in.admit(batch)
				batch = nil
			}
		case wire.KindRelease:
			in.mu.Lock()
			err = wire.ParseRelease(frame, func(p wire.Place) {
				if lease, ok := in.lent[p]; ok {
					delete(in.lent, p)
					lease.Release()
				}
			})
			in.mu.Unlock()
			if err != nil {
				return err
			}
		case wire.KindCancel:
			in.mu.Lock()
			if r := in.waiting[h.ID]; r != nil && !r.cancelled.Swap(true) {
				if r.execution.left--; r.execution.left == 0 {
					r.execution.cancel()
				}
			}
			in.mu.Unlock()
		case wire.KindSegment:
			if err := in.stub.announce(frame, in.conn); err != nil {
				return err
			}
		case wire.KindDrop:
			in.stub.drop(uint32(h.ID))
		default:
			return fmt.Errorf("frame of unknown kind %d", h.Kind)
		}
	}
}

// admit makes the requests of a batch known to later cancel frames.
func (in *instance) admit(batch []*Request) *execution {
	e := &execution{requests: batch, left: len(batch)}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	in.mu.Lock()
	for _, r := range batch {
		r.execution = e
		in.waiting[r.frame.ID] = r
	}
	in.mu.Unlock()
	return e
}

func (in *instance) execute() {
	defer close(in.done)
	defer in.conn.Close()
	var out []byte
	for e := range in.executions {
		begin := wire.Now()
		runnable := make([]*Request, 0, len(e.requests))
		for _, r := range e.requests {
			if err := in.guarded(r.views); err != nil {
				r.Fail(err)
			} else {
				runnable = append(runnable, r)
			}
		}
		if len(runnable) > 0 {
			if err := in.guarded(func() error { return in.author.Execute(e.ctx, runnable) }); err != nil {
				for _, r := range runnable {
					r.Fail(err)
					r.executionFailed = true
				}
			}
		}
		e.cancel()
		end := wire.Now()
		out = out[:0]
		for _, r := range e.requests {
			out = in.answer(out, r, begin, end)
		}
		if in.conn.Send(out) != nil {
			return // the host is gone; the reader sees it too
		}
	}
}

// guarded runs code that reads and writes clients' memory, the author's above all. A fault in
// a region, which its client may truncate at any time, is an error; any other panic ends the
// process, as its state is not to be trusted any more.
func (in *instance) guarded(run func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			if !in.stub.inClientMemory(p.Addr()) {
				panic(p)
			}
			err = errcode.Errorf(errcode.InvalidArg, "a shared memory region of the request was truncated by its client")
		default:
			panic(p)
		}
	}()
	return run()
}

func (r *Request) views() error {
	s := r.instance.stub
	r.inputs = make([]Tensor, len(r.frame.Inputs))
	for i := range r.frame.Inputs {
		w := &r.frame.Inputs[i]
		if int(w.Index) >= len(s.inputNames) {
			return errcode.Errorf(errcode.Internal, "input %d is not in the model's configuration", w.Index)
		}
		t := &r.inputs[i]
		t.Name, t.DataType, t.Shape = s.inputNames[w.Index], w.DataType, w.Shape
		if w.ByteSize > 0 {
			var err error
			if t.data, err = s.view(w.Segment, w.Offset, w.ByteSize); err != nil {
				return err
			}
			// The host has looked at strings that came in the request, and at no region.
			if elements, _ := w.Shape.Elements(); w.DataType == tensor.Bytes && s.isRegion(w.Segment) {
				if err := tensor.CheckBytes(t.data, elements); err != nil {
					return errcode.Errorf(errcode.InvalidArg, "inference input '%s': %w", t.Name, err)
				}
			}
		}
	}
	return nil
}

// answer appends the response to one request, after the announcements of new segments.
func (in *instance) answer(out []byte, r *Request, begin, end int64) []byte {
	response := wire.Response{ID: r.frame.ID, Flags: wire.FlagFinal, Begin: begin, End: end}
	in.mu.Lock()
	delete(in.waiting, r.frame.ID)
	if r.err == nil {
		for i := range r.leases {
			in.lent[wire.Place{Segment: r.leases[i].Segment(), Offset: r.leases[i].Offset()}] = r.leases[i]
		}
	}
	in.mu.Unlock()
	if r.err != nil {
		for i := range r.leases {
			r.leases[i].Release()
		}
		response.Flags |= wire.FlagError
		if r.executionFailed {
			response.Flags |= wire.FlagFailed
		}
		response.Code, response.Message = uint8(errcode.Of(r.err)), r.err.Error()
		if len(response.Message) > wire.MaxMessageByteSize {
			response.Message = response.Message[:wire.MaxMessageByteSize]
		}
		return wire.AppendResponse(out, &response)
	}
	for i := range r.leases {
		l := &r.leases[i]
		if number := l.Segment(); !in.announced[number] {
			in.announced[number] = true
			m := l.Mapping()
			if err := in.conn.SendFD(wire.AppendSegment(nil, number, wire.AccessOutput, uint64(len(m.Data()))), m.FD()); err != nil {
				return out
			}
		}
	}
	for _, t := range r.outputs {
		response.Outputs = append(response.Outputs, wire.Tensor{
			Index: t.index, DataType: t.DataType, Segment: t.segment, Offset: t.offset, ByteSize: uint64(len(t.data)), Shape: t.Shape,
		})
	}
	return wire.AppendResponse(out, &response)
}
