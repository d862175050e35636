// Package stats counts the requests and executions of a model version and adds up their
// durations.
package stats

import (
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Duration is how often something happened and how long it took in all.
type Duration struct {
	Count uint64
	NS    uint64
}

func (d *Duration) add(took time.Duration, count uint64) {
	d.Count += count
	d.NS += uint64(max(took, 1)) * count
}

// Spans are the four spans of a request. Each is 1 ns at least, so that a counter that
// moved shows it.
type Spans struct {
	Queue, ComputeInput, ComputeInfer, ComputeOutput time.Duration
}

// Batch has the durations of executions of one batch size.
type Batch struct {
	Size                                      uint64
	ComputeInput, ComputeInfer, ComputeOutput Duration
}

// Snapshot is all counters at one moment.
type Snapshot struct {
	LastInference                                                   time.Time
	InferenceCount, ExecutionCount                                  uint64
	Success, Fail, Queue, ComputeInput, ComputeInfer, ComputeOutput Duration
	FailureReasons                                                  map[string]uint64
	Batches                                                         []Batch
	Pending                                                         uint64
}

// Model has the counters of one model version. Its methods may be called from any goroutine.
type Model struct {
	// CopiedIn and CopiedOut count the bytes of tensors that the host itself copied: into input
	// arenas, and out of stubs' memory into messages.
	CopiedIn, CopiedOut atomic.Uint64

	mu      sync.Mutex
	s       Snapshot
	batches map[uint64]*Batch
}

// New makes counters that stand at zero.
func New() *Model {
	return &Model{s: Snapshot{FailureReasons: map[string]uint64{}}, batches: map[uint64]*Batch{}}
}

// Arrived counts a request that waits for its execution; Left takes it back.
func (m *Model) Arrived() { m.mu.Lock(); m.s.Pending++; m.mu.Unlock() }

// Left says that a request does not wait any more.
func (m *Model) Left() { m.mu.Lock(); m.s.Pending--; m.mu.Unlock() }

// Succeeded counts a request that was answered, of batchSize items (0 counts as one), and,
// with executions 1, the execution that answered it.
func (m *Model) Succeeded(now time.Time, total time.Duration, batchSize, executions uint64, spans Spans) {
	batchSize = max(batchSize, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.s.LastInference = now
	m.s.InferenceCount += batchSize
	m.s.ExecutionCount += executions
	m.s.Success.add(total, 1)
	m.s.Queue.add(spans.Queue, 1)
	m.s.ComputeInput.add(spans.ComputeInput, 1)
	m.s.ComputeInfer.add(spans.ComputeInfer, 1)
	m.s.ComputeOutput.add(spans.ComputeOutput, 1)
	b := m.batches[batchSize]
	if b == nil {
		b = &Batch{Size: batchSize}
		m.batches[batchSize] = b
	}
	b.ComputeInput.add(spans.ComputeInput, executions)
	b.ComputeInfer.add(spans.ComputeInfer, executions)
	b.ComputeOutput.add(spans.ComputeOutput, executions)
}

// Failed counts a request that failed, and the executions spent on it. The reason is one of
// Triton's: REJECTED, CANCELED, BACKEND, OTHER.
func (m *Model) Failed(total time.Duration, executions uint64, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.s.ExecutionCount += executions
	m.s.Fail.add(total, 1)
	m.s.FailureReasons[reason]++
}

// Snapshot copies the counters; batches are sorted by size.
func (m *Model) Snapshot() Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.s
	out.FailureReasons = make(map[string]uint64, len(m.s.FailureReasons))
	for k, v := range m.s.FailureReasons {
		out.FailureReasons[k] = v
	}
	out.Batches = make([]Batch, 0, len(m.batches))
	for _, b := range m.batches {
		out.Batches = append(out.Batches, *b)
	}
	sort.Slice(out.Batches, func(i, j int) bool { return out.Batches[i].Size < out.Batches[j].Size })
	return out
}
