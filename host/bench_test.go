package host_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/nereid-serve/nereid/client/region"
	"github.com/nereid-serve/nereid/internal/testenv"
)

// copied reads how many bytes of tensors the server itself has copied.
func copied(tb testing.TB, s *testenv.Server) (n float64) {
	tb.Helper()
	reply, err := http.Get("http://" + s.Addresses()["metrics"] + "/metrics")
	if err != nil {
		tb.Fatal(err)
	}
	defer reply.Body.Close()
	text, _ := io.ReadAll(reply.Body)
	for _, m := range regexp.MustCompile(`(?m)^nereid_bytes_copied_total\{.*\} (.*)$`).FindAllSubmatch(text, -1) {
		v, err := strconv.ParseFloat(string(m[1]), 64)
		if err != nil {
			tb.Fatal(err)
		}
		n += v
	}
	return n
}

// BenchmarkInfer is one client, one request at a time, in the server's own process: its
// allocations are those of client and server together. copied-B/op are the bytes of tensors
// that the host copied: nothing for regions, each input once for inline tensors.
func BenchmarkInfer(b *testing.B) {
	repo := testenv.NewRepository(b)
	repo.Add("go", `backend: "identity"`+"\n"+vector, nil)
	repo.AddPython("python", vector, identityPy)
	s := testenv.Start(b, testenv.Options(b, repo.Path))
	b.Cleanup(http.DefaultClient.CloseIdleConnections)
	measure := func(b *testing.B, byteSize int, infer func() error) {
		before := copied(b, s)
		b.SetBytes(int64(2 * byteSize))
		b.ReportAllocs()
		for b.Loop() {
			if err := infer(); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric((copied(b, s)-before)/float64(b.N), "copied-B/op")
	}
	for _, model := range []string{"go", "python"} {
		for _, size := range []int{64, 1 << 20, 16 << 20} {
			name := fmt.Sprintf("%s/%dKiB", model, size>>10)
			if size < 1<<10 {
				name = fmt.Sprintf("%s/%dB", model, size)
			}
			data := floats(size / 4)
			b.Run(name+"/grpc-inline", func(b *testing.B) {
				measure(b, size, func() error {
					_, err := s.Client.Infer(context.Background(), request(model, data))
					return err
				})
			})
			b.Run(name+"/grpc-region", func(b *testing.B) {
				r, err := region.New("bench", uint64(2*size))
				if err != nil {
					b.Fatal(err)
				}
				defer r.Close()
				if err := s.Client.Register(context.Background(), r); err != nil {
					b.Fatal(err)
				}
				defer func() { _ = s.Client.Unregister(context.Background(), "bench") }()
				copy(r.Data(), data)
				q := regionRequest(model, r, r, uint64(size))
				q.Outputs[0].Offset = uint64(size)
				measure(b, size, func() error {
					_, err := s.Client.Infer(context.Background(), q)
					return err
				})
			})
			b.Run(name+"/http-inline", func(b *testing.B) {
				head := fmt.Sprintf(`{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[%d],"parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}`, size/4, size)
				measure(b, size, func() error {
					in, err := http.NewRequest("POST", s.HTTP+filepath.Join("/v2/models", model, "infer"), io.MultiReader(bytes.NewReader([]byte(head)), bytes.NewReader(data)))
					if err != nil {
						return err
					}
					in.ContentLength = int64(len(head) + size)
					in.Header.Set("Inference-Header-Content-Length", strconv.Itoa(len(head)))
					in.Header.Set("Accept-Encoding", "identity") // the client would ask for gzip
					reply, err := http.DefaultClient.Do(in)
					if err != nil {
						return err
					}
					defer reply.Body.Close()
					if reply.StatusCode != http.StatusOK {
						return fmt.Errorf("status %s", reply.Status)
					}
					_, err = io.Copy(io.Discard, reply.Body)
					return err
				})
			})
		}
	}
}
