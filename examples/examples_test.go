// Package examples_test serves every example and infers.
package examples_test

import (
	"context"
	"encoding/binary"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nereid-serve/nereid/client"
	"github.com/nereid-serve/nereid/internal/leakcheck"
	"github.com/nereid-serve/nereid/internal/testenv"
	"github.com/nereid-serve/nereid/tensor"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

func TestIdentityIsSmall(t *testing.T) {
	text, err := os.ReadFile("identity/main.go")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(text), "func main()")
	if n := strings.Count(body, "\n"); n >= 30 {
		t.Errorf("main has %d lines", n)
	}
}

func TestIdentity(t *testing.T) {
	s := testenv.Start(t, testenv.Options(t, "identity/models"))
	reply, err := http.Post(s.HTTP+"/v2/models/identity/infer", "application/json",
		strings.NewReader(`{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[1,2.5]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	body, _ := io.ReadAll(reply.Body)
	if reply.StatusCode != 200 || !strings.Contains(string(body), `"data":[1.0,2.5]`) {
		t.Errorf("%d %s", reply.StatusCode, body)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestPythonLikeAndItsTwin(t *testing.T) {
	// The twin runs in the tests' own environment.
	t.Setenv("PATH", filepath.Dir(testenv.Python(t))+":"+os.Getenv("PATH"))
	s := testenv.Start(t, testenv.Options(t, "python-like/models"))
	numbers := func(f func(i int32) int32) []byte {
		var b []byte
		for i := range int32(40) {
			b = binary.LittleEndian.AppendUint32(b, uint32(f(i)))
		}
		return b
	}
	in := func(name string, data []byte) client.Tensor {
		return client.Tensor{Name: name, DataType: tensor.Int32, Shape: tensor.Shape{2, 20}, Data: data}
	}
	a, b := numbers(func(i int32) int32 { return i * 1000 }), numbers(func(i int32) int32 { return -i })
	for _, model := range []string{"addsub_go", "addsub_python"} {
		out, err := s.Client.Infer(context.Background(), &client.Request{Model: model, Inputs: []client.Tensor{in("INPUT0", a), in("INPUT1", b)}})
		if err != nil {
			t.Fatalf("%s: %v", model, err)
		}
		if string(out.Output("OUTPUT0").Data) != string(numbers(func(i int32) int32 { return i * 999 })) || string(out.Output("OUTPUT1").Data) != string(numbers(func(i int32) int32 { return i * 1001 })) {
			t.Errorf("%s: wrong results", model)
		}
	}
}
