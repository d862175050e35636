package model

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/backend"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/host/modelconfig"
	"github.com/nereid-serve/nereid/host/region"
	"github.com/nereid-serve/nereid/host/repository"
	"github.com/nereid-serve/nereid/host/scheduler/direct"
	"github.com/nereid-serve/nereid/host/stats"
	"github.com/nereid-serve/nereid/host/supervisor"
	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/channel"
	"github.com/nereid-serve/nereid/internal/shm"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
	configpb "github.com/nereid-serve/nereid/proto/config"
)

// State of a model version, as Triton's repository index has it.
type State string

const (
	Loading     State = "LOADING"
	Ready       State = "READY"
	Unloading   State = "UNLOADING"
	Unavailable State = "UNAVAILABLE"
)

// unloaded is the reason of a version that was ended on purpose, as in Triton.
const unloaded = "unloaded"

// firstArenaSegment keeps input arenas' segment numbers apart from those of regions.
const firstArenaSegment = 1 << 30

const (
	firstBackOff = 50 * time.Millisecond
	maxBackOff   = 10 * time.Second
	// soundAfter is how long a stub must run for its next death to count as the first again.
	soundAfter = 10 * time.Second
)

// Version is one version of one model: its stub, its queue, its counters. The stub may die
// and be started again; the Version, its input arena and its queue stay.
type Version struct {
	Name       string
	Number     int64
	Config     *configpb.ModelConfig
	ConfigJSON []byte
	Stats      *stats.Model

	options   *Options
	directory string
	checks    *checks
	specs     []backend.OutputSpec
	scheduler *direct.Scheduler
	arena     *arena.Arena
	logger    *slog.Logger

	mu        sync.Mutex
	state     State
	reason    string
	accepting bool // requests may come: READY, or waiting for a restart
	inflight  int
	restarts  uint64
	idle      chan struct{} // closed when inflight is 0 and accepting is false
	instances []*backend.Instance
	stub      *supervisor.Stub
	ended     chan struct{} // closed when the version's stub is gone for good
	stop      chan struct{} // closed to end the version

	unloadOnce sync.Once
	trimmedAt  atomic.Uint64 // CopiedIn at the last trimIdle
}

func newVersion(o *Options, m *repository.Model, number int64) *Version {
	v := &Version{
		Name: string(m.Name), Number: number, Config: m.Config, ConfigJSON: modelconfig.JSON(m.Config),
		Stats: stats.New(), options: o, directory: m.Directory, checks: newChecks(m.Config),
		scheduler: direct.New(), state: Loading, idle: make(chan struct{}), ended: make(chan struct{}), stop: make(chan struct{}),
		logger: o.Logger.With("model", string(m.Name), "version", number),
	}
	v.arena = arena.New("nereid input "+v.Name, shm.InputSeals, firstArenaSegment, o.InputArenaByteSize)
	v.specs = v.checks.outputSpecs()
	return v
}

// State is the version's state and its reason.
func (v *Version) State() (State, string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state, v.reason
}

// setState changes the state; only unload leads out of UNLOADING.
func (v *Version) setState(s State, reason string, accepting bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.state == Unloading && reason != unloaded {
		return
	}
	v.state, v.reason, v.accepting = s, reason, accepting
	v.checkIdle()
}

func (v *Version) checkIdle() {
	if !v.accepting && v.inflight == 0 && v.state == Unloading {
		select {
		case <-v.idle:
		default:
			close(v.idle)
		}
	}
}

// acquire counts a request that is about to run; false where the version takes none.
func (v *Version) acquire() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.accepting {
		v.inflight++
	}
	return v.accepting
}

// Release ends what Lookup began.
func (v *Version) Release() {
	v.mu.Lock()
	v.inflight--
	v.checkIdle()
	v.mu.Unlock()
}

// load starts the first stub; afterwards a goroutine keeps one running until unload.
func (v *Version) load(ctx context.Context) error {
	if what := modelconfig.NotCarriedOut(v.Config); len(what) > 0 {
		v.logger.Warn("the configuration asks for what this server does not carry out yet: " + strings.Join(what, "; "))
	}
	began := time.Now()
	ctx, cancel := v.untilStopped(ctx)
	defer cancel()
	if err := v.start(ctx); err != nil {
		v.setState(Unavailable, err.Error(), false)
		v.arena.Close()
		close(v.ended)
		return err
	}
	v.setState(Ready, "", true)
	v.logger.Info("model is ready", "took", time.Since(began).Round(time.Millisecond))
	go v.keep()
	return nil
}

// start starts a stub and lets it load the model.
func (v *Version) start(ctx context.Context) error {
	spec, err := v.options.Launcher.Spec(v.Config, v.Number, v.directory)
	if err != nil {
		return err
	}
	spec.Logger, spec.StartTimeout = v.logger, v.options.StartTimeout
	stub, err := supervisor.Start(ctx, spec)
	if err != nil {
		return err
	}
	request := &backendpb.LoadRequest{
		ModelName: v.Name, ModelVersion: v.Number, ModelDirectory: v.directory,
		VersionDirectory: v.directory + "/" + strconv.FormatInt(v.Number, 10), ModelConfigJson: string(v.ConfigJSON),
		BackendConfig: v.options.BackendConfig[v.Config.Backend], OutputByteSizeLimit: v.options.OutputArenaByteSize,
		LogVerbosity: int32(v.options.LogVerbose),
	}
	var instances []*backend.Instance
	for _, g := range v.Config.InstanceGroup {
		for i := range g.Count {
			name := fmt.Sprintf("%s_%d", g.Name, i)
			ours, theirs, err := channel.Pair()
			if err == nil {
				var in *backend.Instance
				in, err = backend.NewInstance(name, ours, v.specs, v)
				if err == nil {
					instances = append(instances, in)
					err = stub.SendChannel(len(instances)-1, theirs)
				}
				theirs.Close()
			}
			if err != nil {
				closeAll(instances)
				stub.Kill()
				return err
			}
			request.Instances = append(request.Instances, &backendpb.Instance{Name: name, Kind: g.Kind.String()})
		}
	}
	loaded := make(chan error, 1)
	go func() {
		_, err := stub.Control.Load(ctx, request)
		loaded <- err
	}()
	select {
	case err = <-loaded:
		if err != nil && supervisor.Broken(err) && endsSoon(stub) {
			err = loadDeath(stub)
		} else if err != nil {
			err = fmt.Errorf("%s", supervisor.Message(err))
		}
	case <-stub.Exited():
		err = loadDeath(stub)
	}
	stub.HideSocket()
	if err != nil {
		closeAll(instances)
		stub.Kill()
		return err
	}
	v.mu.Lock()
	v.stub, v.instances = stub, instances
	v.mu.Unlock()
	for _, in := range instances {
		v.scheduler.Add(in)
	}
	return nil
}

func loadDeath(stub *supervisor.Stub) error {
	return fmt.Errorf("stub ended while it loaded the model: %s", stub.ExitReason())
}

// endsSoon waits a moment for the end of a process whose connections have ended.
func endsSoon(stub *supervisor.Stub) bool {
	select {
	case <-stub.Exited():
		return true
	case <-time.After(exitGrace):
		return false
	}
}

func closeAll(instances []*backend.Instance) {
	for _, in := range instances {
		in.Close()
	}
}

// keep watches the stub and starts another when it ends, until the version is unloaded.
func (v *Version) keep() {
	defer close(v.ended)
	ctx, cancel := v.untilStopped(context.Background())
	defer cancel()
	delay, up := time.Duration(0), time.Now()
	for {
		v.mu.Lock()
		stub, instances := v.stub, v.instances
		v.mu.Unlock()
		select {
		case <-v.stop:
			return
		case <-stub.Exited():
		}
		if v.unloading() {
			<-v.stop
			return
		}
		reason := fmt.Sprintf("stub of model '%s' version %d ended: %s", v.Name, v.Number, stub.ExitReason())
		v.logger.Error(reason + "; starting it again")
		v.setState(Unavailable, reason, true)
		closeAll(instances)
		stub.Kill()
		if time.Since(up) > soundAfter {
			delay = 0
		}
		for {
			// At once the first time; a stub that dies again soon, or does not start, waits longer.
			if !v.pause(delay) {
				return
			}
			delay = min(max(2*delay, firstBackOff), maxBackOff)
			err := v.start(ctx)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				break
			}
			v.logger.Error("the stub did not start again", "error", err, "next_try_in", delay)
			v.setState(Unavailable, reason+"; it did not start again: "+err.Error(), false)
			v.failQueued(v.reasonText())
		}
		up = time.Now()
		if !v.becomeReady() {
			<-v.stop
			return
		}
		v.logger.Info("stub was started again")
	}
}

// pause waits; false where the version is unloaded meanwhile.
func (v *Version) pause(d time.Duration) bool {
	select {
	case <-v.stop:
		return false
	case <-time.After(d):
		return true
	}
}

// untilStopped is ctx until the version is unloaded.
func (v *Version) untilStopped(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-v.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

func (v *Version) unloading() bool {
	state, _ := v.State()
	return state == Unloading
}

// becomeReady is false where the version is being unloaded meanwhile.
func (v *Version) becomeReady() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.state == Unloading {
		return false
	}
	v.state, v.reason, v.accepting = Ready, "", true
	v.restarts++
	return true
}

func (v *Version) reasonText() string {
	_, reason := v.State()
	return reason
}

func (v *Version) failQueued(reason string) {
	for _, r := range v.scheduler.Flush() {
		r.Complete(infer.Unavailable("%s", reason))
	}
}

// Answered implements backend.Events.
func (v *Version) Answered(r *infer.Request, took time.Duration) { v.scheduler.Done(r, took) }

// Ended implements backend.Events: requests that the stub had not begun wait for the next one.
func (v *Version) Ended(i *backend.Instance, unbegun, begun []*infer.Request, err error) {
	v.mu.Lock()
	stub := v.stub
	unloading := v.state == Unloading
	v.mu.Unlock()
	if !unloading && stub != nil {
		// A stub that breaks the protocol, or has lost one instance, is ended; one that died
		// is about to be reaped, and says then how.
		if !endsSoon(stub) {
			what := "closed the data channel"
			if err != io.EOF {
				what = "broke the protocol: " + err.Error()
			}
			stub.Condemn(fmt.Sprintf("was ended, because instance '%s' %s", i.Name, what))
		}
	}
	reason := "the stub ended"
	if stub != nil {
		if r := stub.ExitReason(); r != "" {
			reason = "its stub " + r
			if strings.HasPrefix(r, "exit status") {
				reason = "its stub ended: " + r
			}
		}
	}
	for _, r := range begun {
		r.Complete(&infer.Response{Executed: true, Failed: true, Err: errcode.Errorf(errcode.Unavailable,
			"model '%s' version %d failed while it executed the request: %s", v.Name, v.Number, reason)})
	}
	v.scheduler.Remove(i, unbegun)
	if v.refuses() {
		v.failQueued(v.reasonText())
	}
}

// exitGrace is how long a process may take from closing its data channel to its end.
const exitGrace = 40 * time.Millisecond

// refuses tells whether nothing will run queued requests.
func (v *Version) refuses() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return !v.accepting && v.state == Unavailable
}

// Infer runs a request that Prepare has let pass and whose inputs lie in its lease or in
// regions. It blocks until the response, or until r.Ctx ends, and takes care of the
// request's memory; the caller closes the response.
func (v *Version) Infer(r *infer.Request) *infer.Response {
	r.Open()
	r.Queued = time.Now()
	v.Stats.Arrived()
	v.scheduler.Submit(r)
	if v.refuses() {
		v.failQueued(v.reasonText())
	}
	select {
	case response := <-r.Done():
		r.Close()
		v.Stats.Left()
		v.count(r, response)
		return response
	case <-r.Ctx.Done():
	}
	response := infer.Failed(errcode.Errorf(errcode.Cancelled, "request was cancelled by its client"))
	if v.scheduler.Cancel(r) {
		r.Close()
		v.Stats.Left()
	} else {
		// The stub still reads the inputs: they are given back when it has answered.
		v.mu.Lock()
		v.inflight++
		v.mu.Unlock()
		go func() {
			late := <-r.Done()
			late.Close()
			r.Close()
			v.Stats.Left()
			v.Release()
		}()
	}
	v.count(r, response)
	return response
}

func (v *Version) count(r *infer.Request, response *infer.Response) {
	now := time.Now()
	executions := uint64(0)
	if response.Executed {
		executions = 1
	}
	switch {
	case response.Err == nil || response.Executed && !response.Failed:
		v.Stats.Succeeded(now, now.Sub(r.Received), r.BatchSize, executions, response.Spans)
	case errcode.Of(response.Err) == errcode.Cancelled:
		v.Stats.Failed(now.Sub(r.Received), executions, "CANCELED")
	case response.Executed:
		v.Stats.Failed(now.Sub(r.Received), executions, "BACKEND")
	default:
		v.Stats.Failed(now.Sub(r.Received), executions, "OTHER")
	}
}

// unload drains the version and ends its stub. ctx bounds the drain.
// Calls after the first wait for it.
func (v *Version) unload(ctx context.Context) {
	v.unloadOnce.Do(func() { v.drainAndEnd(ctx) })
}

func (v *Version) drainAndEnd(ctx context.Context) {
	v.setState(Unloading, "", false)
	select {
	case <-v.idle:
	case <-ctx.Done():
	}
	close(v.stop)
	v.mu.Lock()
	stub, instances := v.stub, v.instances
	v.mu.Unlock()
	if stub != nil {
		for _, in := range instances {
			in.CloseWrite()
		}
		if _, err := stub.Control.Unload(ctx, &backendpb.UnloadRequest{}); err != nil {
			v.logger.Warn("unload", "error", supervisor.Message(err))
		}
		stub.Kill()
	}
	<-v.ended
	v.mu.Lock()
	again := v.stub
	v.mu.Unlock()
	if again != stub { // a restart was under way
		again.Kill()
	}
	closeAll(instances)
	v.failQueued("model is unloaded")
	v.arena.Close()
	v.setState(Unavailable, unloaded, false)
}

// ForgetRegion tells the stub that a client's region ended.
func (v *Version) ForgetRegion(number uint32) {
	v.mu.Lock()
	instances := v.instances
	v.mu.Unlock()
	for _, in := range instances {
		in.Forget(number)
	}
}

// LeaseInputs lends the request memory for its inline inputs; it waits for room until r.Ctx
// ends. Errors: Unavailable.
func (v *Version) LeaseInputs(r *infer.Request, byteSize uint64) ([]byte, error) {
	if byteSize == 0 {
		return nil, nil
	}
	lease, err := v.arena.LeaseWait(r.Ctx, byteSize)
	if err != nil {
		return nil, errcode.Errorf(errcode.Unavailable, "model '%s': inputs: %w; raise --input-arena-byte-size", v.Name, err)
	}
	r.SetLease(lease)
	for i := range r.Frame.Inputs {
		if r.Inputs[i].Region == nil {
			r.Frame.Inputs[i].Segment = lease.Segment()
			r.Frame.Inputs[i].Offset += lease.Offset()
		}
	}
	return lease.Data(), nil
}

// Restarts is how often the stub ended and was started again.
func (v *Version) Restarts() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.restarts
}

// trimIdle gives the pages of the input arena back when no request came since the last call.
func (v *Version) trimIdle() {
	n := v.Stats.CopiedIn.Load()
	if v.trimmedAt.Swap(n) == n {
		v.arena.Trim()
	}
}

// Memory is what the version's input arena holds, in bytes.
func (v *Version) Memory() (used, peak, total uint64) { return v.arena.Usage() }

// useRegion resolves a client's wish.
func (v *Version) useRegion(r *infer.Request, ref *infer.RegionRef) (*region.Region, uint64, error) {
	g, offset, err := v.options.Regions.Use(ref.Name, ref.Offset, ref.ByteSize)
	if err != nil {
		return nil, 0, err
	}
	r.Regions = append(r.Regions, g)
	return g, offset, nil
}
