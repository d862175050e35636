// Package leakcheck fails a test binary that leaves something behind: goroutines, descriptors,
// mappings, child processes, shared-memory objects, temporary files.
package leakcheck

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nereid-serve/nereid/internal/shm"
)

// Main runs the tests of a package and checks afterwards. Call it from TestMain:
//
//	func TestMain(m *testing.M) { leakcheck.Main(m) }
func Main(m *testing.M) {
	// A temporary folder of this binary's own: the tests of other packages run beside it.
	temporary, err := os.MkdirTemp("", "nereid-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "leakcheck:", err)
		os.Exit(1)
	}
	os.Setenv("TMPDIR", temporary)
	before := take()
	code := m.Run()
	if code == 0 {
		// What has been told to end may take a moment; what has not, never ends.
		var left []string
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			if left = before.left(); len(left) == 0 || time.Now().After(deadline) {
				break
			}
		}
		if len(left) > 0 {
			fmt.Fprintln(os.Stderr, "leakcheck: left behind:\n  "+strings.Join(left, "\n  "))
			code = 1
		}
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "leakcheck:", err)
			code = 1
		}
	}
	os.RemoveAll(temporary)
	os.Exit(code)
}

// own begins the names of this process's shared-memory objects.
var own = fmt.Sprintf("/dev/shm/nereid-client-%d-", os.Getpid())

type state struct{ descriptors []string }

func take() state {
	// The runtime's poller makes descriptors of its own on first use.
	if r, w, err := os.Pipe(); err == nil {
		_ = r.SetDeadline(time.Now())
		r.Close()
		w.Close()
	}
	return state{descriptors()}
}

func list(folder string) []string {
	names, _ := filepath.Glob(filepath.Join(folder, "*"))
	return names
}

// descriptors are the targets of this process's descriptors, sorted.
func descriptors() []string {
	var out []string
	for _, path := range list("/proc/self/fd") {
		if target, err := os.Readlink(path); err == nil {
			kind, _, _ := strings.Cut(target, ":") // sockets and pipes by kind: their numbers change
			out = append(out, kind)
		}
	}
	slices.Sort(out)
	return out
}

func (s state) left() []string {
	var out []string
	for _, path := range list("/dev/shm") {
		// Nothing else of ours has a name there.
		if strings.HasPrefix(path, own) || strings.HasPrefix(path, "/dev/shm/nereid") && !strings.HasPrefix(path, "/dev/shm/nereid-client-") {
			out = append(out, path)
		}
	}
	out = append(out, list(os.TempDir())...)
	if n := shm.Open(); n > 0 {
		out = append(out, fmt.Sprintf("%d mappings", n))
	}
	if now := descriptors(); len(now) > len(s.descriptors) {
		out = append(out, fmt.Sprintf("%d descriptors, %d at the start: %v", len(now), len(s.descriptors), now))
	}
	children, _ := filepath.Glob("/proc/self/task/*/children")
	for _, path := range children {
		if text, err := os.ReadFile(path); err == nil && len(text) > 0 {
			out = append(out, "child processes "+string(text))
		}
	}
	return out
}
