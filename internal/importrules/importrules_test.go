// Package importrules keeps the architecture: who may import whom, and through which door
// each outside thing comes in. See docs/ARCHITECTURE.md.
package importrules

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/nereid-serve/nereid"

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
	GoFiles    []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,Deps,GoFiles", module+"/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p pkg
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 20 {
		t.Fatalf("only %d packages found", len(all))
	}
	return all
}

func below(path, folder string) bool {
	return path == module+"/"+folder || strings.HasPrefix(path, module+"/"+folder+"/")
}

// forbidden: packages below from, and all they depend on, must not reach to.
var forbidden = []struct{ from, to, reason string }{
	{"sdk", "host", "a backend author links the SDK alone; what both need is in tensor, errcode or internal"},
	{"host", "sdk", "the host is no backend"},
	{"client", "host", "a client does not carry a server"},
	{"client", "sdk", "a client does not carry a backend"},
	{"sdk", "proto/inference", "two packages that register one proto message panic at start-up; the SDK has the configuration as JSON"},
	{"sdk", "proto/config", "as above"},
	{"stubs", "host", "the Python stub is a stub: it must not know the host's insides"},
	{"tensor", "internal", "a vocabulary owns no mechanism"},
	{"errcode", "internal", "a vocabulary owns no mechanism"},
	{"internal/wire", "internal/channel", "the layout does not know how it travels"},
	{"host/endpoint", "host/supervisor", "endpoints know models, not processes"},
	{"host/scheduler", "host/backend", "a scheduler knows a small interface, so its tests need no process"},
	{"host/scheduler", "host/model", "as above"},
	{"host/region", "host/model", "regions know nothing of who uses them"},
}

func TestForbiddenImports(t *testing.T) {
	for _, p := range packages(t) {
		for _, rule := range forbidden {
			if !below(p.ImportPath, rule.from) {
				continue
			}
			reached := p.Imports
			if rule.from == "sdk" || rule.from == "client" {
				reached = p.Deps
			}
			for _, dep := range reached {
				if below(dep, rule.to) && !below(dep, rule.from) {
					t.Errorf("%s reaches %s: %s", p.ImportPath, dep, rule.reason)
				}
			}
		}
	}
}

// doors: only these packages import the outside thing.
var doors = []struct {
	outside, reason string
	doors           []string
}{
	{"github.com/hashicorp/go-plugin", "launch and handshake are one mechanism on each side", []string{"internal/stubproc", "host/supervisor"}},
	{"github.com/prometheus/client_golang/prometheus", "metrics are shown in one place", []string{"host/metrics"}},
	{"google.golang.org/grpc/mem", "the codec of the hot message is one file", []string{"host/endpoint/grpcv2"}},
	{"github.com/spf13/cobra", "the command line is the program's", []string{"cmd/nereid"}},
	{"github.com/spf13/pflag", "the command line is the program's", []string{"cmd/nereid"}},
	{"unsafe", "see TestUnsafeFiles", []string{"sdk", "proto/backend", "proto/config", "proto/inference"}},
}

func TestDoors(t *testing.T) {
	for _, p := range packages(t) {
		for _, d := range doors {
			if !slices.Contains(p.Imports, d.outside) {
				continue
			}
			if !slices.Contains(d.doors, strings.TrimPrefix(p.ImportPath, module+"/")) {
				t.Errorf("%s imports %s, whose doors are %v: %s", p.ImportPath, d.outside, d.doors, d.reason)
			}
		}
	}
}

// TestMmapDoor keeps the mapping of memory in one package.
func TestMmapDoor(t *testing.T) {
	grep(t, `unix\.Mmap(`, "internal/shm", "memory is mapped in internal/shm alone")
}

// TestUnsafeFiles keeps unsafe where a reader looks for it.
func TestUnsafeFiles(t *testing.T) {
	out, _ := exec.Command("git", "-C", "../..", "grep", "-l", `^\s*"unsafe"$`, "--", "*.go").Output()
	for _, file := range strings.Fields(string(out)) {
		if !strings.HasSuffix(file, "_unsafe.go") && !strings.HasSuffix(file, ".pb.go") {
			t.Errorf("%s imports unsafe; it belongs into a file named *_unsafe.go", file)
		}
	}
}

func grep(t *testing.T, text, folder, reason string) {
	t.Helper()
	out, _ := exec.Command("git", "-C", "../..", "grep", "-lF", strings.ReplaceAll(text, `\`, ""), "--", "*.go").Output()
	found := strings.Fields(string(out))
	if len(found) == 0 {
		t.Fatalf("%s is found nowhere: the rule checks nothing", text)
	}
	for _, file := range found {
		if dir := filepath.ToSlash(filepath.Dir(file)); dir != folder && dir != "internal/importrules" {
			t.Errorf("%s: %s", file, reason)
		}
	}
}
