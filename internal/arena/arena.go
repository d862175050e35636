// Package arena lends parts of shared segments. An arena has one owner, the process that
// allocates; its bookkeeping is private memory, and the other side's only way to give a
// lease back is a message. So a killed process can neither corrupt nor block the other.
//
// Invariants: a byte belongs to at most one of live leases, cached leases and free spans;
// free spans of a segment are sorted by offset and never touch; the sum of the segments'
// sizes never passes the limit.
//
// A released lease goes to a last-in-first-out cache of its size first: memory just used is
// warm, and touching cold shared memory costs more than copying into it. Only when nothing
// fits are the caches merged back into spans; only then does the arena grow.
package arena

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"github.com/nereid-serve/nereid/internal/shm"
)

// Align is the alignment of every lease in bytes: a cache line, and enough for any SIMD load.
const Align = 64

const firstSegment = 256 << 10

// ErrFull is the error of Lease when the arena may not grow any more.
type ErrFull struct{ Want, Limit uint64 }

func (e *ErrFull) Error() string {
	return fmt.Sprintf("no room for %d bytes in an arena of at most %d bytes", e.Want, e.Limit)
}

// Arena lends memory of segments that it makes on demand. Its methods may be called from
// any goroutine.
type Arena struct {
	name  string
	seals int
	limit uint64
	first uint32 // id of the first segment

	mu       sync.Mutex
	segments []*segment
	cache    map[uint64][]place
	total    uint64
	used     uint64
	peak     uint64
	waiters  []chan struct{}
	closed   bool
}

type segment struct {
	mapping *shm.Mapping
	free    []span
}

type span struct{ offset, byteSize uint64 }

type place struct {
	segment int
	offset  uint64
}

// Lease is memory on loan. Its owner calls Release exactly once.
type Lease struct {
	arena *Arena
	at    place
	class uint64
	data  []byte
}

// New makes an empty arena whose segments are sealed with seals and numbered from first on.
func New(name string, seals int, first uint32, limit uint64) *Arena {
	return &Arena{name: name, seals: seals, limit: limit, first: first, cache: map[uint64][]place{}}
}

// class rounds a size up to one of four steps between powers of two, so that at most a
// fifth of a lease is wasted and sizes that are nearly the same share a cache.
func class(n uint64) uint64 {
	if n <= 4*Align {
		return max(Align, (n+Align-1)&^(Align-1))
	}
	step := uint64(1) << (bits.Len64(n-1) - 3)
	return (n + step - 1) &^ (step - 1)
}

// Lease lends byteSize bytes; its contents are whatever was there before.
// Errors: *ErrFull.
func (a *Arena) Lease(byteSize uint64) (Lease, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lease(byteSize)
}

// LeaseWait is Lease, but waits for room while the arena is full, until ctx ends. What would
// not fit either if everything were given back fails at once.
func (a *Arena) LeaseWait(ctx context.Context, byteSize uint64) (Lease, error) {
	for {
		a.mu.Lock()
		lease, err := a.lease(byteSize)
		if err == nil || a.closed || !a.couldFit(byteSize) {
			a.mu.Unlock()
			return lease, err
		}
		wake := make(chan struct{})
		a.waiters = append(a.waiters, wake)
		a.mu.Unlock()
		select {
		case <-wake:
		case <-ctx.Done():
			return Lease{}, err
		}
	}
}

// couldFit tells whether a segment, or one that may still be made, is large enough.
func (a *Arena) couldFit(byteSize uint64) bool {
	if byteSize > a.limit {
		return false
	}
	size := class(byteSize)
	for _, s := range a.segments {
		if uint64(len(s.mapping.Data())) >= size {
			return true
		}
	}
	return size <= a.limit-a.total
}

func (a *Arena) lease(byteSize uint64) (Lease, error) {
	if a.closed || byteSize > a.limit {
		return Lease{}, &ErrFull{byteSize, a.limit}
	}
	size := class(byteSize)
	at, ok := a.find(size)
	if !ok {
		if err := a.grow(size); err != nil {
			return Lease{}, err
		}
		at, _ = a.find(size)
	}
	a.used += size
	a.peak = max(a.peak, a.used)
	data := a.segments[at.segment].mapping.Data()[at.offset : at.offset+byteSize : at.offset+size]
	return Lease{a, at, size, data}, nil
}

func (a *Arena) find(size uint64) (place, bool) {
	if cached := a.cache[size]; len(cached) > 0 {
		a.cache[size] = cached[:len(cached)-1]
		return cached[len(cached)-1], true
	}
	if at, ok := a.carve(size); ok {
		return at, true
	}
	if a.merge() {
		return a.carve(size)
	}
	return place{}, false
}

// carve takes size bytes from the smallest free span that has them.
func (a *Arena) carve(size uint64) (place, bool) {
	best, at, index := uint64(0), place{}, -1
	for i, s := range a.segments {
		for j, f := range s.free {
			if f.byteSize >= size && (index < 0 || f.byteSize < best) {
				best, at, index = f.byteSize, place{i, f.offset}, j
			}
		}
	}
	if index < 0 {
		return at, false
	}
	s := a.segments[at.segment]
	if best == size {
		s.free = slices.Delete(s.free, index, index+1)
	} else {
		s.free[index] = span{at.offset + size, best - size}
	}
	return at, true
}

// merge turns every cached lease back into free spans, joining neighbours.
func (a *Arena) merge() (any bool) {
	for size, places := range a.cache {
		for _, p := range places {
			a.segments[p.segment].put(span{p.offset, size})
			any = true
		}
		delete(a.cache, size)
	}
	return any
}

func (s *segment) put(f span) {
	i, _ := slices.BinarySearchFunc(s.free, f.offset, func(e span, offset uint64) int {
		if e.offset < offset {
			return -1
		}
		return 1
	})
	s.free = slices.Insert(s.free, i, f)
	if i+1 < len(s.free) && f.offset+f.byteSize == s.free[i+1].offset {
		s.free[i].byteSize += s.free[i+1].byteSize
		s.free = slices.Delete(s.free, i+1, i+2)
	}
	if i > 0 && s.free[i-1].offset+s.free[i-1].byteSize == s.free[i].offset {
		s.free[i-1].byteSize += s.free[i].byteSize
		s.free = slices.Delete(s.free, i, i+1)
	}
}

func (a *Arena) grow(size uint64) error {
	want := max(size, firstSegment, a.total) // doubles, so segments stay few
	want = min(want, max(size, 64<<20), a.limit-a.total)
	if want < size {
		return &ErrFull{size, a.limit}
	}
	mapping, err := shm.Create(a.name, want, a.seals)
	if err != nil {
		return err
	}
	a.segments = append(a.segments, &segment{mapping: mapping, free: []span{{0, want}}})
	a.total += want
	return nil
}

// Trim gives the pages of all memory that is not lent back to the system. The segments and
// their addresses stay.
func (a *Arena) Trim() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.merge()
	for _, s := range a.segments {
		for _, f := range s.free {
			s.mapping.Punch(f.offset, f.byteSize)
		}
	}
}

// Usage is the arena's memory in bytes: lent, most ever lent, and in segments.
func (a *Arena) Usage() (used, peak, total uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used, a.peak, a.total
}

// Close unmaps every segment. No lease may be used afterwards; releasing one does nothing.
func (a *Arena) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	for _, s := range a.segments {
		s.mapping.Close()
	}
	a.segments, a.cache = nil, nil
	a.wake()
}

func (a *Arena) wake() {
	for _, w := range a.waiters {
		close(w)
	}
	a.waiters = nil
}

// Data is the lent memory.
func (l *Lease) Data() []byte { return l.data }

// Zero tells whether l lends nothing.
func (l *Lease) Zero() bool { return l.arena == nil }

// Segment is the number of the segment the lease lies in.
func (l *Lease) Segment() uint32 { return l.arena.first + uint32(l.at.segment) }

// Offset is where in the segment it begins, in bytes.
func (l *Lease) Offset() uint64 { return l.at.offset }

// Mapping is the segment itself, to be sent to the other side before its first use.
func (l *Lease) Mapping() *shm.Mapping {
	l.arena.mu.Lock()
	defer l.arena.mu.Unlock()
	if l.arena.closed {
		return nil
	}
	return l.arena.segments[l.at.segment].mapping
}

// Release gives the memory back.
func (l *Lease) Release() {
	a := l.arena
	if a == nil {
		return
	}
	l.arena, l.data = nil, nil
	a.mu.Lock()
	a.used -= l.class
	if !a.closed {
		a.cache[l.class] = append(a.cache[l.class], l.at)
		if len(a.waiters) > 0 {
			a.wake()
		}
	}
	a.mu.Unlock()
}
