// Package direct is Triton's default scheduler: each execution is one request, requests run
// in the order they came, on whichever instance is free.
//
// Invariants: a request is in the queue, at exactly one instance, or completed. The lock is
// not held while an instance is given a request.
//
// An instance whose executions are short is given a few requests ahead, so that it needs not
// wait for the round trip; one whose executions take longer than shortExecution gets the next
// when it has answered, so that no request waits behind a slow one while another instance is
// free. Rejected: always one at a time (a third slower for small models), always several
// (a slow execution then delays requests that a second instance could run).
package direct

import (
	"sync"
	"time"

	"github.com/nereid-serve/nereid/host/infer"
)

const (
	shortExecution = 200 * time.Microsecond
	ahead          = 4
)

// Instance executes requests one after another. Execute must not block for long.
type Instance interface {
	Execute(r *infer.Request)
	Cancel(r *infer.Request)
}

// Scheduler hands requests to the instances of one model version.
type Scheduler struct {
	mu    sync.Mutex
	queue []*infer.Request
	head  int
	slots []*slot
	at    map[*infer.Request]*slot
}

type slot struct {
	instance Instance
	busy     int
	typical  time.Duration // moving average of execution times
}

// New makes a scheduler without instances: requests wait.
func New() *Scheduler { return &Scheduler{at: map[*infer.Request]*slot{}} }

// Add gives the scheduler an instance to use.
func (s *Scheduler) Add(i Instance) {
	s.mu.Lock()
	s.slots = append(s.slots, &slot{instance: i, typical: shortExecution})
	s.mu.Unlock()
	s.dispatch()
}

// Remove takes an instance away. Requests that it had not begun go back to the head of the
// queue in their order.
func (s *Scheduler) Remove(i Instance, unbegun []*infer.Request) {
	s.mu.Lock()
	for k, sl := range s.slots {
		if sl.instance == i {
			s.slots = append(s.slots[:k:k], s.slots[k+1:]...)
			break
		}
	}
	for r, sl := range s.at {
		if sl.instance == i {
			delete(s.at, r)
		}
	}
	s.queue = append(append([]*infer.Request(nil), unbegun...), s.queue[s.head:]...)
	s.head = 0
	s.mu.Unlock()
	s.dispatch()
}

// Submit queues a request.
func (s *Scheduler) Submit(r *infer.Request) {
	s.mu.Lock()
	if s.head == len(s.queue) {
		if sl := s.free(); sl != nil {
			s.give(sl, r)
			s.mu.Unlock()
			sl.instance.Execute(r)
			return
		}
	}
	s.queue = append(s.queue, r)
	s.mu.Unlock()
}

// free is the instance to use next: the least busy one that takes more.
func (s *Scheduler) free() *slot {
	var best *slot
	for _, sl := range s.slots {
		if (sl.busy == 0 || sl.busy < ahead && sl.typical < shortExecution) && (best == nil || sl.busy < best.busy) {
			best = sl
		}
	}
	return best
}

func (s *Scheduler) give(sl *slot, r *infer.Request) {
	sl.busy++
	s.at[r] = sl
}

func (s *Scheduler) dispatch() {
	for {
		s.mu.Lock()
		if s.head == len(s.queue) {
			s.mu.Unlock()
			return
		}
		sl := s.free()
		if sl == nil {
			s.mu.Unlock()
			return
		}
		r := s.pop()
		s.give(sl, r)
		s.mu.Unlock()
		sl.instance.Execute(r)
	}
}

func (s *Scheduler) pop() *infer.Request {
	r := s.queue[s.head]
	s.queue[s.head] = nil
	if s.head++; s.head == len(s.queue) {
		s.queue, s.head = s.queue[:0], 0
	}
	return r
}

// Done says that an instance has answered r after executing it for took.
func (s *Scheduler) Done(r *infer.Request, took time.Duration) {
	s.mu.Lock()
	if sl := s.at[r]; sl != nil {
		delete(s.at, r)
		sl.busy--
		sl.typical += (min(took, time.Second) - sl.typical) / 8
		if took > shortExecution {
			sl.typical = max(sl.typical, shortExecution)
		}
	}
	more := s.head < len(s.queue)
	s.mu.Unlock()
	if more {
		s.dispatch()
	}
}

// Cancel takes a request out of the queue and tells true, or tells the instance that has it
// that nobody waits.
func (s *Scheduler) Cancel(r *infer.Request) (removed bool) {
	s.mu.Lock()
	for i := s.head; i < len(s.queue); i++ {
		if s.queue[i] == r {
			s.queue = append(s.queue[:i], s.queue[i+1:]...)
			s.mu.Unlock()
			return true
		}
	}
	sl := s.at[r]
	s.mu.Unlock()
	if sl != nil {
		sl.instance.Cancel(r)
	}
	return false
}

// Flush takes every queued request out, for the caller to complete.
func (s *Scheduler) Flush() []*infer.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := append([]*infer.Request(nil), s.queue[s.head:]...)
	s.queue, s.head = nil, 0
	return out
}
