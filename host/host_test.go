package host_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
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
