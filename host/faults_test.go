package host_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nereid-serve/nereid/client/region"
	"github.com/nereid-serve/nereid/internal/testenv"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
)

// truncate shrinks a client's region behind the server's back.
func truncate(t *testing.T, r *region.Region) {
	t.Helper()
	if err := os.Truncate("/dev/shm"+r.Key(), 0); err != nil {
		t.Fatal(err)
	}
}

func TestTruncatedRegionFailsThatRequest(t *testing.T) {
	s := testenv.Start(t, testenv.Options(t, both(t).Path))
	for _, model := range []string{"go", "python"} {
		in, out := newRegion(t, s, model+"-in", 8192), newRegion(t, s, model+"-out", 8192)
		if _, err := s.Client.Infer(within(t), regionRequest(model, in, out, 8192)); err != nil {
			t.Fatal(err)
		}
		truncate(t, in)
		_, err := s.Client.Infer(within(t), regionRequest(model, in, out, 8192))
		wantCode(t, err, codes.InvalidArgument, "truncated", "'"+model+"-in'")
		echo(t, s, model, 100)
	}
}

const slowPy = `import time
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.flag = args["model_repository"] + "/executing"
    def execute(self, requests):
        out = []
        for r in requests:
            x = pb.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            open(self.flag, "w").close()
            if len(x) > 1:
                while not __import__("os").path.exists(self.flag + ".go"):
                    time.sleep(0.001)
            out.append(pb.InferenceResponse([pb.Tensor("OUTPUT0", x + 0)]))
        return out
`

func exists(path string) func() bool {
	return func() bool { _, err := os.Stat(path); return err == nil }
}

// TestTruncateWhileExecuting: the fault is the interpreter's, which ends; the request says
// how, and the next one runs in a new interpreter.
func TestTruncateWhileExecuting(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.AddPython("slow", vector, slowPy)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	in := newRegion(t, s, "in", 1<<16)
	failed := make(chan error, 1)
	go func() {
		r := regionRequest("slow", in, in, 1<<16)
		r.Outputs = nil
		_, err := s.Client.Infer(within(t), r)
		failed <- err
	}()
	flag := filepath.Join(repo.Path, "slow", "executing")
	testenv.Eventually(t, "the model executes", exists(flag))
	truncate(t, in)
	repo.Write("slow/executing.go", "")
	wantCode(t, <-failed, codes.Unavailable, "'slow'", "signal 7")
	echo(t, s, "slow", 1)
}

func kill(t *testing.T, title string) {
	t.Helper()
	pids := testenv.Processes(title)
	if len(pids) == 0 {
		t.Fatalf("no process %q", title)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

// TestKilledStub: what executed fails at once and says how, what was queued is served by the
// next stub, and another model does not notice.
func TestKilledStub(t *testing.T) {
	for _, victim := range []struct{ name, title string }{{"interpreter", "nereid python slow/1"}, {"stub", "python-stub slow/1"}} {
		t.Run(victim.name, func(t *testing.T) {
			repo := both(t)
			repo.AddPython("slow", vector, slowPy)
			s := testenv.Start(t, testenv.Options(t, repo.Path))
			var wg sync.WaitGroup
			errs := make([]error, 6)
			for i := range errs {
				wg.Go(func() { _, errs[i] = s.Client.Infer(within(t), request("slow", floats(2))) })
			}
			flag := filepath.Join(repo.Path, "slow", "executing")
			testenv.Eventually(t, "the model executes", exists(flag))
			pending := func() bool {
				out, err := http.Get("http://" + s.Addresses()["metrics"] + "/metrics")
				if err != nil {
					return false
				}
				defer out.Body.Close()
				text, _ := io.ReadAll(out.Body)
				return strings.Contains(string(text), `nv_inference_pending_request_count{model="slow",version="1"} 6`)
			}
			testenv.Eventually(t, "all requests are pending", pending)
			kill(t, victim.title)
			echo(t, s, "go", 10)
			repo.Write("slow/executing.go", "")
			wg.Wait()
			failed := 0
			for _, err := range errs {
				if err != nil {
					failed++
					wantCode(t, err, codes.Unavailable, "'slow'", "killed by signal 9")
				}
			}
			if failed != 1 {
				t.Errorf("%d requests failed, want the one that executed: %v", failed, errs)
			}
			echo(t, s, "slow", 3)
			testenv.Eventually(t, "the server is ready again", s.Ready)
		})
	}
}

func TestKilledGoStub(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.Add("killed", `backend: "identity"`+"\n"+vector, nil)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	for range 5 {
		echo(t, s, "killed", 7)
		kill(t, "nereid-backend-identity killed/1")
		testenv.Eventually(t, "the model is served again", func() bool {
			_, err := s.Client.Infer(within(t), request("killed", floats(3)))
			return err == nil
		})
	}
}

// TestKilledForkServer: its interpreters end with it, and come back with a new one.
func TestKilledForkServer(t *testing.T) {
	s := testenv.Start(t, testenv.Options(t, both(t).Path))
	echo(t, s, "python", 3)
	killed := 0
	for _, pid := range testenv.Processes("nereid python fork server") {
		// Tests of other packages run beside, with fork servers of their own.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, rest, _ := strings.Cut(string(stat), ") ")
		if fields := strings.Fields(rest); err == nil && len(fields) > 1 && fields[1] == fmt.Sprint(os.Getpid()) {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			killed++
		}
	}
	if killed != 1 {
		t.Fatalf("%d fork servers", killed)
	}
	echo(t, s, "go", 3)
	testenv.Eventually(t, "the Python model is served again", func() bool {
		_, err := s.Client.Infer(within(t), request("python", floats(3)))
		return err == nil
	})
}

// TestMisbehavingStubs: whatever a stub says, the request gets a clear error, the server and
// its other models go on, and the model is served again.
func TestMisbehavingStubs(t *testing.T) {
	modes := []struct {
		mode   string
		code   codes.Code
		phrase string
	}{
		{"offset past the end", codes.Internal, "pass the end"}, {"offset overflow", codes.Internal, "pass the end"},
		{"unknown segment", codes.Internal, "not announced"}, {"byte size", codes.Internal, "has 12 bytes"},
		{"negative dimension", codes.Internal, "has shape [-1,2]"}, {"unknown output", codes.Internal, "output 7"},
		{"output twice", codes.Internal, "twice"}, {"error code", codes.Internal, "of no known kind"},
		{"wrong id", codes.Unavailable, "mode"}, {"garbage", codes.Unavailable, "mode"}, {"unsealed segment", codes.Unavailable, "mode"},
		{"exit", codes.Unavailable, "exit status 7"}, {"panic", codes.Unavailable, "exit status 2"}, {"segv", codes.Unavailable, ""},
	}
	repo := testenv.NewRepository(t)
	repo.Add("go", `backend: "identity"`+"\n"+vector, nil)
	for i, m := range modes {
		repo.Add(fmt.Sprintf("mode%d", i), fmt.Sprintf("backend: \"misbehave\"\nparameters { key: \"mode\" value { string_value: %q } }\n", m.mode)+vector, nil)
	}
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	for i, m := range modes {
		name := fmt.Sprintf("mode%d", i)
		t.Run(m.mode, func(t *testing.T) {
			for range 2 { // the second meets the stub that took the first one's place
				_, err := s.Client.Infer(within(t), request(name, floats(2)))
				wantCode(t, err, m.code, strings.Replace(m.phrase, "mode", name, 1))
			}
			echo(t, s, "go", 5)
		})
	}
}

func TestAnswerTwice(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.Add("twice", "backend: \"misbehave\"\nparameters { key: \"mode\" value { string_value: \"answer twice\" } }\n"+vector, nil)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	// The first answer counts; the second is for a request that is over, and ends the stub.
	if _, err := s.Client.Infer(within(t), request("twice", floats(2))); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "it is served again", func() bool {
		_, err := s.Client.Infer(within(t), request("twice", floats(2)))
		return err == nil
	})
}

// TestHungStub: a client that gives up is not kept, and the server ends in time.
func TestHungStub(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.Add("hang", "backend: \"misbehave\"\nparameters { key: \"mode\" value { string_value: \"hang\" } }\n"+vector, nil)
	o := testenv.Options(t, repo.Path)
	o.ExitTimeout = time.Second
	s := testenv.Start(t, o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		_, err := s.Client.Infer(ctx, request("hang", floats(2)))
		done <- err
	}()
	testenv.Eventually(t, "the request is pending", func() bool {
		stats, err := s.Client.Service.ModelStatistics(within(t), &inferencepb.ModelStatisticsRequest{Name: "hang"})
		return err == nil && len(stats.ModelStats) == 1
	})
	cancel()
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Fatal(err)
	}
	short, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	s.Shutdown(short)
}

// TestStopWhileLoading: a model that takes for ever to load does not keep the server.
func TestStopWhileLoading(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.AddPython("endless", vector, `import os, time
open(os.path.dirname(__file__) + "/loading", "w").close()
time.sleep(1000)
`)
	o := testenv.Options(t, repo.Path)
	o.Explicit = true
	s := testenv.Start(t, o)
	failed := make(chan error, 1)
	go func() {
		_, err := s.Client.Service.RepositoryModelLoad(context.Background(), &inferencepb.RepositoryModelLoadRequest{ModelName: "endless"})
		failed <- err
	}()
	testenv.Eventually(t, "the model loads", exists(filepath.Join(repo.Path, "endless", "1", "loading")))
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	s.Shutdown(ctx)
	if err := <-failed; err == nil {
		t.Error("it was loaded")
	}
}

func TestBrokenModelsSayWhy(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.Add("good", `backend: "identity"`+"\n"+vector, nil)
	repo.AddPython("syntax", vector, "def broken(:\n")
	repo.AddPython("raises", vector, "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights here')\n    def execute(self, requests):\n        pass\n")
	repo.AddPython("classless", vector, "x = 1\n")
	repo.AddPython("exits", vector, "import os\nos._exit(5)\n")
	repo.Add("environment", `backend: "python" parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/no/such/env" } }`+"\n"+vector, map[string]string{"model.py": identityPy})
	repo.Add("backendless", `backend: "nobody"`+"\n"+vector, nil)
	repo.Add("refuses", `backend: "misbehave" parameters { key: "mode" value { string_value: "error in load" } }`+"\n"+vector, nil)
	repo.Add("dies", `backend: "misbehave" parameters { key: "mode" value { string_value: "exit in load" } }`+"\n"+vector, nil)
	repo.Add("field", `backend: "identity" no_such_field: 1`+"\n", nil)
	repo.Add("versionless", `backend: "identity" version_policy { specific { versions: [ 7 ] } }`+"\n"+vector, nil)
	repo.Write("unconfigured/1/model.py", identityPy)
	repo.Add("ensemble", `platform: "ensemble" ensemble_scheduling { step [ ] }`, nil)
	o := testenv.Options(t, repo.Path)
	o.StrictReadiness = false
	s := testenv.Start(t, o)
	for model, phrases := range map[string][]string{
		"syntax": {"SyntaxError", "model.py", "line 1"}, "raises": {"ValueError: no weights here", "Traceback", "initialize"},
		"classless": {"no class TritonPythonModel"}, "exits": {"ended"}, "environment": {"/no/such/env"},
		"backendless": {"nereid-backend-nobody"}, "refuses": {"does not want to"}, "dies": {"exit status 3"},
		"field": {"line 2", "no_such_field"}, "versionless": {"version 7"}, "unconfigured": {"config.pbtxt"}, "ensemble": {"not supported yet"},
	} {
		reason := s.Reason(t, model)
		for _, p := range append(phrases, "UNAVAILABLE") {
			if !strings.Contains(reason, p) {
				t.Errorf("%s: reason %q does not say %q", model, reason, p)
			}
		}
	}
	if !s.Ready() {
		t.Error("without strict readiness the server is not ready")
	}
	echo(t, s, "good", 4)
}

func TestPythonWithoutNumpy(t *testing.T) {
	bare := filepath.Join(t.TempDir(), "python3")
	// -S leaves site-packages out, and so numpy.
	if err := os.WriteFile(bare, []byte("#!/bin/sh\nexec "+testenv.Python(t)+" -S \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	repo := testenv.NewRepository(t)
	repo.Add("bare", fmt.Sprintf("backend: \"python\" parameters { key: \"EXECUTION_ENV_PATH\" value { string_value: %q } }\n", bare)+vector, map[string]string{"model.py": identityPy})
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	if reason := s.Reason(t, "bare"); !strings.Contains(reason, "needs numpy") || !strings.Contains(reason, "EXECUTION_ENV_PATH") {
		t.Errorf("reason %q", reason)
	}
}
