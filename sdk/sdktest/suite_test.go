package sdktest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/leakcheck"
	"github.com/nereid-serve/nereid/sdk"
	"github.com/nereid-serve/nereid/sdk/sdktest"
	"github.com/nereid-serve/nereid/tensor"
)

func TestMain(m *testing.M) { leakcheck.Main(m) }

// suiteBackend is the model that the suite asks for, on the Go SDK.
type suiteBackend struct{}

func (b suiteBackend) LoadModel(context.Context, *sdk.ModelInfo) (sdk.Model, error) { return b, nil }

func (b suiteBackend) NewInstance(context.Context, *sdk.InstanceInfo) (sdk.Instance, error) {
	return b, nil
}

func (suiteBackend) Execute(_ context.Context, requests []*sdk.Request) error {
	for _, r := range requests {
		switch r.ID() {
		case "fail all":
			return errors.New("all")
		case "fail one":
			if _, err := r.Output("DATA_OUT", tensor.Uint8, tensor.Shape{1000}); err != nil {
				return err
			}
			r.Fail(errcode.Errorf(errcode.Unavailable, "one"))
			continue
		}
		if err := answer(r); err != nil {
			r.Fail(err)
		}
	}
	return nil
}

func answer(r *sdk.Request) error {
	for _, in := range r.Inputs() {
		if in.DataType == tensor.Bytes {
			elements, err := in.Strings()
			if err != nil {
				return err
			}
			if _, err = r.OutputBytes("TEXT_OUT", in.Shape, elements); err != nil {
				return err
			}
			continue
		}
		out, err := r.Output("DATA_OUT", in.DataType, in.Shape)
		if err != nil {
			return err
		}
		copy(out.Data(), in.Data())
	}
	number, text := r.CorrelationID()
	if text == "" {
		text = fmt.Sprint(number)
	}
	_, err := r.OutputBytes("ABOUT", tensor.Shape{1}, [][]byte{fmt.Appendf(nil, "%s|%s|%s", r.ID(), r.Parameters(), text)})
	return err
}

func TestSuite(t *testing.T) {
	sdktest.Suite(t, func(tb testing.TB) *sdktest.Driver { return sdktest.New(tb, suiteBackend{}, sdktest.SuiteConfig) })
}

// TestClientThatGoes: the context ends when nobody waits for any request of an execution.
func TestClientThatGoes(t *testing.T) {
	started := make(chan struct{})
	backend := sdk.Each(func(ctx context.Context, r *sdk.Request) error {
		if r.ID() != "wait" {
			return nil
		}
		close(started)
		<-ctx.Done()
		if !r.Cancelled() {
			return errors.New("the context ended, and the request is not cancelled")
		}
		return errcode.Errorf(errcode.Cancelled, "seen")
	})
	d := sdktest.New(t, backend, sdktest.SuiteConfig)
	answer := d.Begin("wait")
	<-started
	d.Cancel()
	if err := answer(); errcode.Of(err) != errcode.Cancelled || err.Error() != "seen" {
		t.Errorf("answered %v", err)
	}
	if _, err := d.Infer(); err != nil {
		t.Error(err)
	}
}

func TestViews(t *testing.T) {
	backend := sdk.Each(func(_ context.Context, r *sdk.Request) error {
		in, err := r.Input("DATA")
		if err != nil {
			return err
		}
		if _, err := sdk.View[int64](in); err == nil {
			return errors.New("UINT8 was viewed as int64")
		}
		if _, err := r.Output("NONE", tensor.FP32, nil); err == nil {
			return errors.New("an output of no configuration was allocated")
		}
		if _, err := r.Output("DATA_OUT", tensor.FP32, tensor.Shape{-1}); err == nil {
			return errors.New("an output of negative size was allocated")
		}
		out, err := r.Output("DATA_OUT", tensor.FP64, tensor.Shape{3})
		if err != nil {
			return err
		}
		if _, err := r.Output("DATA_OUT", tensor.FP64, tensor.Shape{3}); err == nil {
			return errors.New("an output was allocated twice")
		}
		view, err := sdk.View[float64](out)
		if err != nil {
			return err
		}
		copy(view, []float64{1, 2, 3})
		return nil
	})
	d := sdktest.New(t, backend, sdktest.SuiteConfig)
	out, err := d.Infer(sdktest.Input{Name: "DATA", DataType: tensor.Uint8, Shape: tensor.Shape{1}, Data: []byte{1}})
	if err != nil {
		t.Fatal(err)
	}
	if got := out["DATA_OUT"]; got.DataType != tensor.FP64 || len(got.Data) != 24 {
		t.Errorf("got %+v", got)
	}
}
