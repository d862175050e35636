package region_test

import (
	"math"
	"os"
	"strings"
	"testing"

	"pgregory.net/rapid"

	clientregion "github.com/nereid-serve/nereid/client/region"
	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/region"
	"github.com/nereid-serve/nereid/internal/leakcheck"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

func object(t *testing.T, byteSize uint64) *clientregion.Region {
	t.Helper()
	o, err := clientregion.New("x", byteSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Close() })
	return o
}

func TestBounds(t *testing.T) {
	o := object(t, 8192)
	g := region.New()
	defer g.Close()
	for _, c := range []struct {
		offset, size uint64
		ok           bool
	}{{0, 8192, true}, {4096, 4096, true}, {3, 5, true}, {0, 8193, false}, {8192, 1, false}, {1, 8192, false}, {math.MaxUint64, 2, false}, {1 << 63, 1 << 63, false}, {0, 0, false}} {
		err := g.Register("r", o.Key(), c.offset, c.size)
		if (err == nil) != c.ok || err != nil && errcode.Of(err) != errcode.InvalidArg {
			t.Errorf("register %d at %d: %v", c.size, c.offset, err)
		}
		g.Unregister("r")
	}
	if err := g.Register("r", o.Key(), 100, 1000); err != nil {
		t.Fatal(err)
	}
	if err := g.Register("r", o.Key(), 0, 1); errcode.Of(err) != errcode.AlreadyExists {
		t.Errorf("twice: %v", err)
	}
	if err := g.Register("same object", o.Key(), 0, 8192); err != nil {
		t.Errorf("one key under two names: %v", err)
	}
	for _, c := range []struct {
		offset, size uint64
		ok           bool
	}{{0, 1000, true}, {999, 1, true}, {1000, 0, true}, {0, 1001, false}, {1000, 1, false}, {math.MaxUint64, 1, false}, {2, math.MaxUint64, false}} {
		r, at, err := g.Use("r", c.offset, c.size)
		if (err == nil) != c.ok || err == nil && at != 100+c.offset {
			t.Errorf("use %d at %d: at %d, %v", c.size, c.offset, at, err)
		}
		if err == nil {
			r.Release()
		}
	}
	if err := os.Truncate("/dev/shm"+o.Key(), 500); err != nil {
		t.Fatal(err)
	}
	if _, _, err := g.Use("r", 0, 1000); err == nil || !strings.Contains(err.Error(), "truncated to 500 bytes") {
		t.Errorf("after truncating: %v", err)
	}
	if r, _, err := g.Use("r", 0, 400); err != nil {
		t.Errorf("what is still there: %v", err)
	} else {
		r.Release()
	}
}

// TestUnregisterWhileInUse: a region lives as long as somebody uses it, and is forgotten once.
func TestUnregisterWhileInUse(t *testing.T) {
	o := object(t, 4096)
	rapid.Check(t, func(t *rapid.T) {
		g := region.New()
		forgotten := map[uint32]int{}
		g.Forget = func(n uint32) { forgotten[n]++ }
		var uses []*region.Region
		numbers := map[uint32]bool{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "act") {
			case 0:
				_ = g.Register("r", o.Key(), 0, 4096)
			case 1:
				if r, _, err := g.Use("r", 0, 10); err == nil {
					uses = append(uses, r)
					numbers[r.Number] = true
				}
			case 2:
				g.Unregister("")
				if _, _, err := g.Use("r", 0, 1); errcode.Of(err) != errcode.NotFound {
					t.Fatalf("used after it was unregistered: %v", err)
				}
			case 3:
				if len(uses) > 0 {
					uses[0].Release()
					uses = uses[1:]
				}
			}
			for _, r := range uses {
				if forgotten[r.Number] > 0 {
					t.Fatal("forgotten while in use")
				}
			}
		}
		g.Unregister("")
		for _, r := range uses {
			r.Release()
		}
		for n := range numbers {
			if forgotten[n] != 1 {
				t.Fatalf("region %d was forgotten %d times", n, forgotten[n])
			}
		}
		if infos, _ := g.Status(""); len(infos) != 0 {
			t.Fatalf("left: %v", infos)
		}
	})
}
