package channel_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"

	"github.com/nereid-serve/nereid/internal/channel"
	"github.com/nereid-serve/nereid/internal/leakcheck"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/internal/wire"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

func pair(tb testing.TB) (a, b *channel.Conn) {
	tb.Helper()
	x, y, err := channel.Pair()
	if err != nil {
		tb.Fatal(err)
	}
	open := func(f *os.File) *channel.Conn {
		c, err := channel.New(f)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { c.Close(); c.CloseFiles() })
		return c
	}
	return open(x), open(y)
}

// TestFramesArriveWhole: frames of many writers, longer than the socket's buffer among them,
// arrive in each writer's order and in one piece.
func TestFramesArriveWhole(t *testing.T) {
	a, b := pair(t)
	const writers, each = 8, 200
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				n := 1 + (w*31+i*977)%3000
				if i%50 == 0 {
					n = 600_000
				}
				r := wire.Response{ID: uint64(w)<<32 | uint64(i), Message: string(bytes.Repeat([]byte{byte(i)}, n))}
				if err := a.Send(wire.AppendResponse(nil, &r)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	next := [writers]int{}
	for range writers * each {
		frame, err := b.Next()
		if err != nil {
			t.Fatal(err)
		}
		var r wire.Response
		if err := wire.ParseResponse(frame, &r); err != nil {
			t.Fatal(err)
		}
		w, i := int(r.ID>>32), int(uint32(r.ID))
		if next[w] != i || bytes.Count([]byte(r.Message), []byte{byte(i)}) != len(r.Message) {
			t.Fatalf("writer %d: frame %d, want %d", w, i, next[w])
		}
		next[w]++
	}
	wg.Wait()
	a.Close()
	if _, err := b.Next(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
}

func TestDescriptorsKeepTheirPlace(t *testing.T) {
	a, b := pair(t)
	for i := range 20 {
		m, err := shm.Create("test", 4096, shm.OutputSeals)
		if err != nil {
			t.Fatal(err)
		}
		m.Data()[0] = byte(i)
		if err := a.Send(wire.AppendMark(nil, wire.KindDrop, uint64(i))); err != nil {
			t.Fatal(err)
		}
		if err := a.SendFD(wire.AppendSegment(nil, uint32(i), wire.AccessOutput, 4096), m.FD()); err != nil {
			t.Fatal(err)
		}
		m.Close()
	}
	for i := range 20 {
		if frame, err := b.Next(); err != nil || wire.ParseHeader(frame).Kind != wire.KindDrop {
			t.Fatal(err)
		}
		if _, err := b.Next(); err != nil {
			t.Fatal(err)
		}
		file, err := b.TakeFile()
		if err != nil {
			t.Fatal(err)
		}
		m, err := shm.Import(file, 4096, false)
		if err != nil {
			t.Fatal(err)
		}
		if m.Data()[0] != byte(i) {
			t.Errorf("segment %d has the descriptor of %d", i, m.Data()[0])
		}
		m.Close()
	}
	if _, err := b.TakeFile(); err == nil {
		t.Error("a descriptor that nobody sent")
	}
}

func TestStreamThatIsNoFrames(t *testing.T) {
	for name, bytes := range map[string][]byte{"short": make([]byte, 16), "huge": bytes.Repeat([]byte{0xff}, 32)} {
		a, b := pair(t)
		if err := a.Send(bytes); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Next(); err == nil || err == io.EOF {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestUnsealedSegmentIsRefused: what its maker could shrink would fault under the reader.
func TestUnsealedSegmentIsRefused(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	if _, err := shm.Import(f, 4096, false); err != shm.ErrNotSealed {
		t.Errorf("got %v", err)
	}
	m, err := shm.Create("test", 4096, shm.InputSeals)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if again, err := os.OpenFile(fdPath(m), os.O_RDWR, 0); err == nil {
		if _, err := shm.Import(again, 4096, true); err == nil {
			t.Error("an input segment was mapped for writing")
		}
	}
	if err := os.Truncate(fdPath(m), 0); err == nil {
		t.Error("an input segment was truncated")
	}
}

func fdPath(m *shm.Mapping) string { return fmt.Sprintf("/proc/self/fd/%d", m.FD()) }

func BenchmarkRoundTrip(b *testing.B) {
	x, y := pair(b)
	go func() {
		for {
			frame, err := y.Next()
			if err != nil {
				return
			}
			_ = y.Send(frame)
		}
	}()
	frame := wire.AppendMark(nil, wire.KindCancel, 1)
	b.ReportAllocs()
	for b.Loop() {
		if x.Send(frame) != nil {
			b.Fatal("send")
		}
		if _, err := x.Next(); err != nil {
			b.Fatal(err)
		}
	}
}
