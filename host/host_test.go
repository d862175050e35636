package host_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
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

	"github.com/nereid-serve/nereid/client"
	"github.com/nereid-serve/nereid/client/region"
	"github.com/nereid-serve/nereid/internal/leakcheck"
	"github.com/nereid-serve/nereid/internal/testenv"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
	"github.com/nereid-serve/nereid/tensor"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

const vector = `input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
`

const identityPy = `import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("OUTPUT0", pb.get_input_tensor_by_name(r, "INPUT0").as_numpy())]) for r in requests]
`

func floats(n int) []byte {
	b := make([]byte, 4*n)
	for i := range n {
		binary.LittleEndian.PutUint32(b[4*i:], uint32(i)<<8)
	}
	return b
}

func request(model string, data []byte) *client.Request {
	return &client.Request{Model: model, Inputs: []client.Tensor{{Name: "INPUT0", DataType: tensor.FP32, Shape: tensor.Shape{int64(len(data) / 4)}, Data: data}}}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func echo(t *testing.T, s *testenv.Server, model string, n int) {
	t.Helper()
	data := floats(n)
	out, err := s.Client.Infer(within(t), request(model, data))
	if err != nil {
		t.Fatalf("%s: %v", model, err)
	}
	if got := out.Output("OUTPUT0"); got == nil || string(got.Data) != string(data) {
		t.Fatalf("%s: %d floats came back as %+v", model, n, got)
	}
}

func wantCode(t *testing.T, err error, code codes.Code, phrases ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("got %v, want %v", err, code)
	}
	for _, p := range phrases {
		if !strings.Contains(client.Message(err), p) {
			t.Fatalf("message %q does not say %q", client.Message(err), p)
		}
	}
}

func both(t *testing.T) *testenv.Repository {
	t.Helper()
	r := testenv.NewRepository(t)
	r.Add("go", `backend: "identity"`+"\n"+vector, nil)
	r.AddPython("python", vector, identityPy)
	return r
}

func TestTensorsOfManySizes(t *testing.T) {
	s := testenv.Start(t, testenv.Options(t, both(t).Path))
	for _, model := range []string{"go", "python"} {
		for _, n := range []int{0, 1, 15, 16, 17, 4095, 4096, 4097, 1 << 18, 1<<20 + 1} {
			echo(t, s, model, n)
		}
	}
}

func TestManyClientsAtOnce(t *testing.T) {
	s := testenv.Start(t, testenv.Options(t, both(t).Path))
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for k := range 20 {
				data := floats(1 + 997*i + k)
				out, err := s.Client.Infer(within(t), request([]string{"go", "python"}[i%2], data))
				if err != nil || string(out.Output("OUTPUT0").Data) != string(data) {
					t.Errorf("client %d, request %d: %v", i, k, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func newRegion(t *testing.T, s *testenv.Server, name string, byteSize uint64) *region.Region {
	t.Helper()
	r, err := region.New(name, byteSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	if err := s.Client.Register(within(t), r); err != nil {
		t.Fatal(err)
	}
	return r
}

func regionRequest(model string, in, out *region.Region, byteSize uint64) *client.Request {
	return &client.Request{
		Model:   model,
		Inputs:  []client.Tensor{{Name: "INPUT0", DataType: tensor.FP32, Shape: tensor.Shape{int64(byteSize / 4)}, Region: in, ByteSize: byteSize}},
		Outputs: []client.Tensor{{Name: "OUTPUT0", Region: out, ByteSize: byteSize}},
	}
}

func TestRegions(t *testing.T) {
	s := testenv.Start(t, testenv.Options(t, both(t).Path))
	for _, model := range []string{"go", "python"} {
		const n = 1 << 20
		in, out := newRegion(t, s, model+"-in", n), newRegion(t, s, model+"-out", n)
		copy(in.Data(), floats(n/4))
		if _, err := s.Client.Infer(within(t), regionRequest(model, in, out, n)); err != nil {
			t.Fatal(err)
		}
		if string(in.Data()) != string(out.Data()) {
			t.Errorf("%s: the output region differs from the input", model)
		}
		_, err := s.Client.Infer(within(t), &client.Request{
			Model:   model,
			Inputs:  []client.Tensor{{Name: "INPUT0", DataType: tensor.FP32, Shape: tensor.Shape{1024}, Region: in, ByteSize: 4096}},
			Outputs: []client.Tensor{{Name: "OUTPUT0", Region: out, ByteSize: 4092}},
		})
		wantCode(t, err, codes.Internal, "should be at least 4096 bytes")
	}
	if err := s.Client.Unregister(within(t), ""); err != nil {
		t.Fatal(err)
	}
	in, err := region.New("go-in", 64)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	_, err = s.Client.Infer(within(t), regionRequest("go", in, in, 64))
	wantCode(t, err, codes.NotFound, "Unable to find shared memory region: 'go-in'")
}

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

const keepPy = `import triton_python_backend_utils as pb
import numpy as np

class TritonPythonModel:
    """Answers with what the request before brought: it keeps a view of its input."""
    def initialize(self, args):
        self.kept = None
    def execute(self, requests):
        out = []
        for r in requests:
            x = pb.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            assert not x.flags.writeable
            before, self.kept = self.kept, x[1:]
            out.append(pb.InferenceResponse([pb.Tensor("OUTPUT0", np.zeros(1, np.float32) if before is None else before)]))
        return out
`

// TestKeptInputs: a model may hold on to an input; its memory stays as it was.
func TestKeptInputs(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.AddPython("keep", vector, keepPy)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	var before []byte
	for i := range 50 {
		data := floats(64)
		for k := range data {
			data[k] ^= byte(i)
		}
		out, err := s.Client.Infer(within(t), request("keep", data))
		if err != nil {
			t.Fatal(err)
		}
		if before != nil && string(out.Output("OUTPUT0").Data) != string(before[4:]) {
			t.Fatalf("request %d: the kept input changed", i)
		}
		before = data
	}
}

const allocatePy = `import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            x = pb.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            t = pb.allocate_output(r, "OUTPUT0", x.shape, np.float32)
            np.multiply(x, 1, out=t.as_numpy())
            out.append(pb.InferenceResponse([t]))
        return out
`

func TestAllocatedOutputs(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.AddPython("allocate", vector, allocatePy)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	for i := range 100 {
		echo(t, s, "allocate", 1+i*100)
	}
	in, out := newRegion(t, s, "in", 4096), newRegion(t, s, "out", 4096)
	copy(in.Data(), floats(1024))
	if _, err := s.Client.Infer(within(t), regionRequest("allocate", in, out, 4096)); err != nil {
		t.Fatal(err)
	}
	if string(in.Data()) != string(out.Data()) {
		t.Error("the output region differs from the input")
	}
}

// TestFullArena: requests wait for memory while others hold it, and what can never fit is
// refused with the flag to raise.
func TestFullArena(t *testing.T) {
	o := testenv.Options(t, both(t).Path)
	o.InputArenaByteSize, o.OutputArenaByteSize = 1<<20, 1<<20
	s := testenv.Start(t, o)
	for _, model := range []string{"go", "python"} {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				if _, err := s.Client.Infer(within(t), request(model, floats(100_000))); err != nil && status.Code(err) != codes.Unavailable {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		_, err := s.Client.Infer(within(t), request(model, floats(1<<19)))
		wantCode(t, err, codes.Unavailable, "--input-arena-byte-size")
		echo(t, s, model, 1000)
	}
}

func TestLoadAndUnload(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.Add("m", `backend: "identity"`+"\n"+vector, nil)
	o := testenv.Options(t, repo.Path)
	o.Explicit = true
	s := testenv.Start(t, o)
	ctx := within(t)
	load := func() error {
		_, err := s.Client.Service.RepositoryModelLoad(ctx, &inferencepb.RepositoryModelLoadRequest{ModelName: "m"})
		return err
	}
	_, err := s.Client.Infer(ctx, request("m", floats(1)))
	wantCode(t, err, codes.NotFound, "unknown model")
	if err := load(); err != nil {
		t.Fatal(err)
	}
	first := testenv.Processes("nereid-backend-identity m/1")
	// Unchanged files: nothing happens.
	if err := load(); err != nil {
		t.Fatal(err)
	}
	if again := testenv.Processes("nereid-backend-identity m/1"); fmt.Sprint(again) != fmt.Sprint(first) {
		t.Errorf("an unchanged model was loaded again: %v, %v", first, again)
	}
	// Changed files under load: no request fails.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := s.Client.Infer(ctx, request("m", floats(16))); err != nil {
					t.Errorf("during the swap: %v", err)
					return
				}
			}
		})
	}
	for i := range 3 {
		repo.Write(fmt.Sprintf("m/%d/x", i+2), "")
		if err := load(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
	out, err := s.Client.Infer(ctx, request("m", floats(1)))
	if err != nil || out.Version != "4" {
		t.Errorf("version %v, %v", out, err)
	}
	// A broken change leaves the old version serving.
	repo.Write("m/config.pbtxt", "name: \"m\"\nbackend: \"nobody\"\n"+vector)
	wantCode(t, load(), codes.Internal, "nereid-backend-nobody")
	echo(t, s, "m", 3)
	if _, err := s.Client.Service.RepositoryModelUnload(ctx, &inferencepb.RepositoryModelUnloadRequest{ModelName: "m"}); err != nil {
		t.Fatal(err)
	}
	_, err = s.Client.Infer(ctx, request("m", floats(1)))
	wantCode(t, err, codes.NotFound)
	testenv.Eventually(t, "its processes are gone", func() bool { return len(testenv.Processes("nereid-backend-identity m/")) == 0 })
}

func TestBadNames(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.Add("m", `backend: "identity"`+"\n"+vector, nil)
	o := testenv.Options(t, repo.Path)
	o.Explicit = true
	s := testenv.Start(t, o)
	for _, name := range []string{"", ".", "..", "../m", "/etc", "m/1", "a\x00b", "$(id)", ";id", "`id`", strings.Repeat("a", 256), "m\\x", "\u202e", "m/../m"} {
		_, err := s.Client.Infer(within(t), request(name, floats(1)))
		wantCode(t, err, codes.NotFound)
		_, err = s.Client.Service.RepositoryModelLoad(within(t), &inferencepb.RepositoryModelLoadRequest{ModelName: name})
		wantCode(t, err, codes.Internal, "failed to poll from model repository")
	}
	// And the region's name.
	for _, key := range []string{"", "/", "..", "/..", "../../etc/passwd", "a/b", "/proc/self/mem", "x\x00y", strings.Repeat("k", 300)} {
		_, err := s.Client.Service.SystemSharedMemoryRegister(within(t), &inferencepb.SystemSharedMemoryRegisterRequest{Name: "r", Key: key, ByteSize: 1})
		if status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.Internal {
			t.Errorf("key %q: %v", key, err)
		}
	}
}

// post sends one HTTP request and returns status and body.
func post(t *testing.T, s *testenv.Server, path, body string, headers ...string) (int, string) {
	t.Helper()
	r, err := http.NewRequest("POST", s.HTTP+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	text, err := io.ReadAll(reply.Body)
	if err != nil {
		t.Fatal(err)
	}
	return reply.StatusCode, string(text)
}

func TestRawBinaryRequest(t *testing.T) {
	repo := both(t)
	repo.Add("text", "backend: \"identity\" max_batch_size: 4\ninput [ { name: \"INPUT0\" data_type: TYPE_STRING dims: [ 1 ] } ]\noutput [ { name: \"OUTPUT0\" data_type: TYPE_STRING dims: [ 1 ] } ]\n", nil)
	repo.Add("two", "backend: \"identity\"\ninput [ { name: \"INPUT0\" data_type: TYPE_INT8 dims: [ 1 ] }, { name: \"INPUT1\" data_type: TYPE_INT8 dims: [ 1 ] } ]\n", nil)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	data := string(floats(5))
	for model, c := range map[string]struct {
		body, want string
		status     int
	}{
		"go": {data, data, 200}, "python": {data, data, 200}, "text": {"some text", "\x09\x00\x00\x00some text", 200}, "two": {"ab", "must only have 1 input", 400},
	} {
		status, text := post(t, s, "/v2/models/"+model+"/infer", c.body, "Inference-Header-Content-Length", "0")
		if status != c.status || !strings.Contains(text, c.want) {
			t.Errorf("%s: %d %q", model, status, text)
		}
	}
	if status, text := post(t, s, "/v2/models/go/infer", ""); status != 200 {
		t.Errorf("an empty body is a raw request without elements: %d %s", status, text)
	}
	if status, text := post(t, s, "/v2/models/go/infer", data[:7], "Inference-Header-Content-Length", "0"); status != 400 || !strings.Contains(text, "Expected 4, got 7") {
		t.Errorf("%d %s", status, text)
	}
}

func TestStringsInRegions(t *testing.T) {
	repo := testenv.NewRepository(t)
	text := "input [ { name: \"INPUT0\" data_type: TYPE_STRING dims: [ -1 ] } ]\noutput [ { name: \"OUTPUT0\" data_type: TYPE_STRING dims: [ -1 ] } ]\n"
	repo.Add("go", "backend: \"identity\"\n"+text, nil)
	repo.AddPython("python", text, identityPy)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	r := newRegion(t, s, "r", 64)
	for _, model := range []string{"go", "python"} {
		for bytes, ok := range map[string]bool{"\x01\x00\x00\x00a\x00\x00\x00\x00": true, "\x06\x00\x00\x00a\x00\x00\x00\x00": false, "\x05\x00\x00\x00a\x00\x00\x00\x00": false, "\xff\xff\xff\xffaaaaa": false} {
			copy(r.Data(), bytes)
			_, err := s.Client.Infer(within(t), &client.Request{Model: model, Inputs: []client.Tensor{{Name: "INPUT0", DataType: tensor.Bytes, Shape: tensor.Shape{2}, Region: r, ByteSize: uint64(len(bytes))}}})
			if ok && err != nil {
				t.Errorf("%s: %v", model, err)
			} else if !ok {
				wantCode(t, err, codes.InvalidArgument, "INPUT0")
			}
		}
	}
}

func TestRequestOverTheLimit(t *testing.T) {
	o := testenv.Options(t, both(t).Path)
	o.MaxRequestByteSize = 10_000
	s := testenv.Start(t, o)
	_, err := s.Client.Infer(within(t), request("go", floats(5000)))
	wantCode(t, err, codes.ResourceExhausted)
	for _, headers := range [][]string{nil, {"Inference-Header-Content-Length", "0"}, {"Inference-Header-Content-Length", "15000"}} {
		if status, text := post(t, s, "/v2/models/go/infer", strings.Repeat(" ", 20_000), headers...); status != 400 || !strings.Contains(text, "--max-request-byte-size") {
			t.Errorf("%v: %d %s", headers, status, text)
		}
	}
	// A small body that unpacks to a large one.
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	if _, err := w.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if status, text := post(t, s, "/v2/models/go/infer", packed.String(), "Content-Encoding", "gzip"); status != 400 || !strings.Contains(text, "--max-request-byte-size") {
		t.Errorf("packed: %d %s", status, text)
	}
	echo(t, s, "go", 10)
}

// TestBigFramesBothWays: requests and answers that fill the socket in both directions at once
// do not block each other.
func TestBigFramesBothWays(t *testing.T) {
	repo := testenv.NewRepository(t)
	repo.AddPython("loud", vector, `class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("x" * 1000000)
`)
	s := testenv.Start(t, testenv.Options(t, repo.Path))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 10 {
				r := request("loud", floats(2))
				r.Parameters = map[string]any{"p": strings.Repeat("y", 900_000)}
				_, err := s.Client.Infer(within(t), r)
				if status.Code(err) != codes.Internal || !strings.Contains(client.Message(err), "xxxx") {
					t.Errorf("%.200v", err)
				}
			}
		})
	}
	wg.Wait()
}
