// Package testenv gives tests the real thing: this project's programs, built once, a Python
// with numpy, model repositories, and a running server.
package testenv

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nereid-serve/nereid/client"
	"github.com/nereid-serve/nereid/host"
)

// Root is the project's root folder.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

var build = sync.OnceValues(func() (string, error) {
	folder := filepath.Join(Root(), ".build", "test")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	for name, source := range map[string]string{
		"nereid": "./cmd/nereid", "nereid-backend-identity": "./examples/identity",
		"nereid-backend-python-like": "./examples/python-like", "nereid-backend-misbehave": "./internal/testenv/misbehave",
	} {
		cmd := exec.Command("go", "build", "-o", filepath.Join(folder, name), source)
		cmd.Dir = Root()
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w\n%s", source, err, out)
		}
	}
	return folder, nil
})

// Bin is the folder with nereid, the example backends and the misbehaving one.
func Bin(tb testing.TB) string {
	tb.Helper()
	folder, err := build()
	if err != nil {
		tb.Fatal(err)
	}
	return folder
}

// Python is an interpreter that has numpy: NEREID_TEST_PYTHON, or that of the virtual
// environment that `make test` makes. A test that needs one fails without.
func Python(tb testing.TB) string {
	tb.Helper()
	path := os.Getenv("NEREID_TEST_PYTHON")
	if path == "" {
		path = filepath.Join(Root(), ".build", "venv", "bin", "python3")
	}
	if out, err := exec.Command(path, "-c", "import numpy").CombinedOutput(); err != nil {
		tb.Fatalf("no Python with numpy at %s (%v): run `make venv`, or set NEREID_TEST_PYTHON\n%s", path, err, out)
	}
	return path
}

// Repository is a model repository of a test's own.
type Repository struct {
	tb   testing.TB
	Path string
}

// NewRepository makes an empty one, which ends with the test.
func NewRepository(tb testing.TB) *Repository { return &Repository{tb, tb.TempDir()} }

// Add writes a model: its configuration without the name, and the files of version 1 by name.
func (r *Repository) Add(name, config string, files map[string]string) *Repository {
	r.tb.Helper()
	r.Write(name+"/config.pbtxt", fmt.Sprintf("name: %q\n%s", name, config))
	r.Write(name+"/1/.keep", "")
	for file, text := range files {
		r.Write(name+"/1/"+file, text)
	}
	return r
}

// Write writes one file below the repository.
func (r *Repository) Write(path, text string) {
	r.tb.Helper()
	full := filepath.Join(r.Path, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		r.tb.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
		r.tb.Fatal(err)
	}
}

// AddPython adds a model of the Python backend that runs in Python(tb).
func (r *Repository) AddPython(name, config, code string) *Repository {
	r.tb.Helper()
	return r.Add(name, fmt.Sprintf("backend: \"python\"\nparameters { key: \"EXECUTION_ENV_PATH\" value { string_value: %q } }\n%s", Python(r.tb), config), map[string]string{"model.py": code})
}

// Server is a server in the test's own process, with real stubs.
type Server struct {
	*host.Host
	Client *client.Client
	HTTP   string // "http://host:port"
}

// Log is what a test's server logs; NEREID_TEST_LOG=1 shows it.
func Log() *slog.Logger {
	if os.Getenv("NEREID_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.NewTextHandler(io.Discard, nil))
}

// Options are for a server on free ports of loopback.
func Options(tb testing.TB, repositories ...string) host.Options {
	tb.Helper()
	o := host.DefaultOptions()
	local := host.Listen{Allow: true, Address: "127.0.0.1"}
	o.HTTP, o.GRPC, o.Metrics = local, local, local
	o.ModelRepositories = repositories
	bin := Bin(tb)
	o.BackendDirectories = []string{bin}
	o.PythonStub = []string{filepath.Join(bin, "nereid"), "python-stub"}
	o.Logger = Log()
	o.ExitTimeout = 10 * time.Second
	return o
}

// Start starts a server, which ends with the test. Models may fail to load: the test looks.
func Start(tb testing.TB, o host.Options) *Server {
	tb.Helper()
	h, err := host.Start(context.Background(), o)
	if h == nil {
		tb.Fatal(err)
	}
	if err != nil {
		tb.Logf("start: %v", err)
	}
	c, err := client.Dial(h.Addresses()["grpc"])
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		h.Shutdown(ctx)
	})
	return &Server{h, c, "http://" + h.Addresses()["http"]}
}

// Reason is why a model is not ready; "" if it is.
func (s *Server) Reason(tb testing.TB, model string) string {
	tb.Helper()
	rows, err := s.Models()
	if err != nil {
		tb.Fatal(err)
	}
	for _, r := range rows {
		if r.Name == model {
			if r.State == "READY" {
				return ""
			}
			return string(r.State) + ": " + r.Reason
		}
	}
	tb.Fatalf("no model %s in the index", model)
	return ""
}

// Eventually waits until ok says true, and fails the test if it never does.
func Eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(20 * time.Second); ; {
		if ok() {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("never came true: %s", what)
		}
	}
}

// Processes are the ids of the processes whose command line has text in it.
func Processes(text string) []int {
	var out []int
	folders, _ := filepath.Glob("/proc/[0-9]*")
	for _, f := range folders {
		line, _ := os.ReadFile(filepath.Join(f, "cmdline"))
		if strings.Contains(strings.ReplaceAll(string(line), "\x00", " "), text) {
			var pid int
			if _, err := fmt.Sscan(filepath.Base(f), &pid); err == nil && pid != os.Getpid() {
				out = append(out, pid)
			}
		}
	}
	return out
}
