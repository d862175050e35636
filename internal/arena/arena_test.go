package arena_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/leakcheck"
	"github.com/nereid-serve/nereid/internal/shm"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

// TestLeasesNeverOverlap drives an arena with random leases and releases: each lease keeps
// what was written to it, the sums are right, and when all is given back everything that fits
// the limit can be lent again.
func TestLeasesNeverOverlap(t *testing.T) {
	const limit = 4 << 20
	rapid.Check(t, func(t *rapid.T) {
		a := arena.New("test", shm.InputSeals, 7, limit)
		defer a.Close()
		type held struct {
			lease arena.Lease
			mark  byte
		}
		var live []held
		mark := byte(0)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "act") {
			case 0, 1, 2, 3, 4:
				n := rapid.OneOf(rapid.Uint64Range(1, 300), rapid.Uint64Range(1, 70_000), rapid.Uint64Range(1, limit)).Draw(t, "bytes")
				l, err := a.Lease(n)
				var full *arena.ErrFull
				if err != nil {
					if !errors.As(err, &full) {
						t.Fatal(err)
					}
					continue
				}
				if uint64(len(l.Data())) != n || l.Offset()%arena.Align != 0 || l.Segment() < 7 {
					t.Fatalf("lease of %d bytes: %d bytes at %d of segment %d", n, len(l.Data()), l.Offset(), l.Segment())
				}
				mark++
				for i := range l.Data() {
					l.Data()[i] = mark
				}
				live = append(live, held{l, mark})
			case 5:
				a.Trim()
			default:
				if len(live) > 0 {
					i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
					for _, b := range live[i].lease.Data() {
						if b != live[i].mark {
							t.Fatal("a lease was written to by another")
						}
					}
					live[i].lease.Release()
					live = append(live[:i], live[i+1:]...)
				}
			}
			used, peak, total := a.Usage()
			if used > total || total > limit || peak < used {
				t.Fatalf("used %d, peak %d, total %d", used, peak, total)
			}
		}
		for i := range live {
			live[i].lease.Release()
		}
		if used, _, _ := a.Usage(); used != 0 {
			t.Fatalf("%d bytes are lent after everything was released", used)
		}
	})
}

func TestWaitsForRoom(t *testing.T) {
	a := arena.New("test", shm.InputSeals, 0, 1<<20)
	defer a.Close()
	first, err := a.Lease(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		l, err := a.LeaseWait(ctx, 1<<19)
		l.Release()
		got <- err
	}()
	first.Release()
	if err := <-got; err != nil {
		t.Error(err)
	}
	var full *arena.ErrFull
	if _, err := a.LeaseWait(ctx, 1<<21); !errors.As(err, &full) {
		t.Errorf("what can never fit: %v", err)
	}
	// Two segments of half the limit never hold more than that, however long one waits.
	halves := arena.New("test", shm.InputSeals, 0, 1<<20)
	defer halves.Close()
	for range 2 {
		l, err := halves.Lease(1 << 19)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Release()
	}
	if _, err := halves.LeaseWait(ctx, 1<<20); !errors.As(err, &full) {
		t.Errorf("what no segment can hold: %v", err)
	}
	if _, err = a.Lease(1 << 20); err != nil {
		t.Fatal(err)
	}
	gone, stop := context.WithCancel(context.Background())
	stop()
	if _, err := a.LeaseWait(gone, 1); !errors.As(err, &full) {
		t.Errorf("with nobody waiting: %v", err)
	}
}

func BenchmarkLease(b *testing.B) {
	a := arena.New("bench", shm.InputSeals, 0, 1<<24)
	defer a.Close()
	b.ReportAllocs()
	for b.Loop() {
		l, err := a.Lease(4096)
		if err != nil {
			b.Fatal(err)
		}
		l.Release()
	}
}
