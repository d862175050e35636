package python_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nereid-serve/nereid/internal/leakcheck"
	"github.com/nereid-serve/nereid/internal/testenv"
	"github.com/nereid-serve/nereid/sdk/sdktest"
	"github.com/nereid-serve/nereid/stubs/python"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

const suitePy = `import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            if r.request_id() == "fail all":
                raise RuntimeError("all")
            if r.request_id() == "fail one":
                responses.append(pb.InferenceResponse(error=pb.TritonError("one", pb.TritonError.UNAVAILABLE)))
                continue
            out = []
            for name in ("DATA", "TEXT"):
                t = pb.get_input_tensor_by_name(r, name)
                if t is not None:
                    out.append(pb.Tensor(name + "_OUT", t.as_numpy()))
            about = "%s|%s|%s" % (r.request_id(), r.parameters(), r.correlation_id())
            out.append(pb.Tensor("ABOUT", np.array([about.encode()], dtype=object)))
            responses.append(pb.InferenceResponse(out))
        return responses
`

// loader starts a stub of the test's own process with a real fork server and interpreter.
func loader(tb testing.TB) sdktest.Loader {
	tb.Helper()
	servers := python.NewForkServers(testenv.Log(), os.Environ())
	tb.Cleanup(servers.Close)
	connection, err := servers.Connect(testenv.Python(tb))
	if err != nil {
		tb.Fatal(err)
	}
	fd, err := unix.FcntlInt(connection.Fd(), unix.F_DUPFD_CLOEXEC, 0) // an *os.File would close it when it is collected
	connection.Close()
	if err != nil {
		tb.Fatal(err)
	}
	gone := make(chan struct{})
	s := python.NewStub(fd, func(error) { close(gone) })
	tb.Cleanup(func() {
		_ = unix.Shutdown(fd, unix.SHUT_RDWR) // wakes the receiver, which no close would
		<-gone
		unix.Close(fd)
	})
	return s
}

// model writes a model's folder.
func model(tb testing.TB, code string) (folder, version string) {
	tb.Helper()
	folder = tb.TempDir()
	version = filepath.Join(folder, "1")
	if err := os.Mkdir(version, 0o755); err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(version, "model.py"), []byte(code), 0o644); err != nil {
		tb.Fatal(err)
	}
	return folder, version
}

func TestSuite(t *testing.T) {
	sdktest.Suite(t, func(tb testing.TB) *sdktest.Driver {
		folder, version := model(tb, suitePy)
		d, err := sdktest.Load(tb, loader(tb), sdktest.SuiteConfig, folder, version)
		if err != nil {
			tb.Fatal(err)
		}
		return d
	})
}

func TestInterpreter(t *testing.T) {
	env := t.TempDir()
	if _, err := python.Interpreter(env, "/"); err == nil {
		t.Error("a folder without bin/python3 is no environment")
	}
	if err := os.Mkdir(filepath.Join(env, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(env, "bin", "python3")
	if err := os.WriteFile(program, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, given := range []string{env, program, "$$TRITON_MODEL_DIRECTORY", "bin/python3"} {
		if got, err := python.Interpreter(given, env); err != nil || got != program {
			t.Errorf("%s: %s, %v", given, got, err)
		}
	}
	packed := filepath.Join(env, "env.tar.gz")
	if err := os.WriteFile(packed, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := python.Interpreter(packed, "/"); err == nil {
		t.Error("a packed environment is not supported yet, and must say so")
	}
}
