package direct_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/host/scheduler/direct"
)

// fake is an instance that notes what it is given.
type fake struct {
	has       []*infer.Request
	cancelled []*infer.Request
}

func (f *fake) Execute(r *infer.Request) { f.has = append(f.has, r) }
func (f *fake) Cancel(r *infer.Request)  { f.cancelled = append(f.cancelled, r) }

func names(rs []*infer.Request) (out string) {
	for _, r := range rs {
		out += r.ID
	}
	return out
}

func TestOrderAndFairness(t *testing.T) {
	s := direct.New()
	var rs []*infer.Request
	for i := range 6 {
		rs = append(rs, &infer.Request{ID: fmt.Sprint(i)})
		s.Submit(rs[i])
	}
	a, b := &fake{}, &fake{}
	s.Add(a)
	s.Add(b)
	if names(a.has) != "0" || names(b.has) != "1" {
		t.Fatalf("two idle instances have %q and %q, want one each", names(a.has), names(b.has))
	}
	s.Done(rs[1], time.Second)
	if names(b.has) != "12" {
		t.Errorf("the free instance has %q", names(b.has))
	}
	if !s.Cancel(rs[4]) || s.Cancel(rs[2]) || names(b.cancelled) != "2" {
		t.Error("cancel: one was queued, the other executed")
	}
	s.Remove(b, []*infer.Request{rs[2]})
	s.Done(rs[0], time.Second)
	if names(a.has) != "02" {
		t.Errorf("what the dead instance had not begun comes first: %q", names(a.has))
	}
	if left := names(s.Flush()); left != "35" {
		t.Errorf("queued %q", left)
	}
}

// TestShortExecutionsGoAhead: an instance that answers quickly is given more than one.
func TestShortExecutionsGoAhead(t *testing.T) {
	s := direct.New()
	a := &fake{}
	s.Add(a)
	for i := range 200 {
		r := &infer.Request{ID: fmt.Sprint(i)}
		s.Submit(r)
		s.Done(r, time.Microsecond)
	}
	a.has = nil
	for i := range 9 {
		s.Submit(&infer.Request{ID: fmt.Sprint(i)})
	}
	if names(a.has) != "0123" {
		t.Errorf("a quick instance was given %q ahead", names(a.has))
	}
	s.Done(a.has[0], time.Second)
	s.Done(a.has[1], time.Second)
	if names(a.has) != "0123" {
		t.Errorf("a slow one was given more: %q", names(a.has))
	}
}

// TestNoRequestIsLost: whatever instances come and go, each request is at one place.
func TestNoRequestIsLost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := direct.New()
		var live []*fake
		done := map[*infer.Request]int{}
		var all []*infer.Request
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			switch rapid.IntRange(0, 6).Draw(t, "act") {
			case 0:
				f := &fake{}
				live = append(live, f)
				s.Add(f)
			case 1:
				if len(live) > 0 {
					f := live[0]
					live = live[1:]
					s.Remove(f, slices.Clone(f.has))
				}
			case 2, 3:
				r := &infer.Request{}
				all = append(all, r)
				s.Submit(r)
			case 4:
				if len(all) > 0 {
					if r := all[rapid.IntRange(0, len(all)-1).Draw(t, "which")]; done[r] == 0 && s.Cancel(r) {
						done[r]++
					}
				}
			default:
				if len(live) > 0 {
					f := live[rapid.IntRange(0, len(live)-1).Draw(t, "instance")]
					if len(f.has) > 0 {
						r := f.has[0]
						f.has = f.has[1:]
						done[r]++
						s.Done(r, time.Duration(rapid.IntRange(0, 1000).Draw(t, "µs"))*time.Microsecond)
					}
				}
			}
		}
		for _, f := range live {
			for _, r := range f.has {
				done[r]++
			}
		}
		for _, r := range s.Flush() {
			done[r]++
		}
		for _, r := range all {
			if done[r] != 1 {
				t.Fatalf("a request is at %d places", done[r])
			}
		}
	})
}
