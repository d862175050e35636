// Python-like is a backend with the three acts of a Python model, initialize, execute and
// finalize, in Go. models/addsub_python/1/model.py is its twin: same inputs, same results.
package main

import (
	"context"
	"fmt"

	"github.com/nereid-serve/nereid/sdk"
)

func main() { sdk.Serve(backend{}) }

type backend struct{}

// LoadModel is what the file model.py is: it is run once a process.
func (backend) LoadModel(_ context.Context, info *sdk.ModelInfo) (sdk.Model, error) {
	for _, in := range info.Config.Inputs {
		if in.DataType != "TYPE_INT32" {
			return nil, fmt.Errorf("input '%s' must be TYPE_INT32, not %s", in.Name, in.DataType)
		}
	}
	return model{info}, nil
}

type model struct{ info *sdk.ModelInfo }

// NewInstance is initialize(args).
func (m model) NewInstance(_ context.Context, info *sdk.InstanceInfo) (sdk.Instance, error) {
	sdk.Verbosef("%s is initialized", info.Name)
	return &instance{name: info.Name}, nil
}

type instance struct {
	name     string
	executed int
}

// Execute is execute(requests): OUTPUT0 is the sum of the inputs, OUTPUT1 their difference.
func (i *instance) Execute(_ context.Context, requests []*sdk.Request) error {
	for _, r := range requests {
		if err := addSub(r); err != nil {
			r.Fail(err)
		}
	}
	i.executed += len(requests)
	return nil
}

func addSub(r *sdk.Request) error {
	// The inputs are views: of the host's memory, or of the client's own region.
	a, in, err := input(r, "INPUT0")
	if err != nil {
		return err
	}
	b, _, err := input(r, "INPUT1")
	if err != nil {
		return err
	}
	for _, out := range []struct {
		name string
		sign int32
	}{{"OUTPUT0", 1}, {"OUTPUT1", -1}} {
		if !r.Wanted(out.name) {
			continue
		}
		// And so are the outputs: what is written here is not copied again.
		t, err := r.Output(out.name, in.DataType, in.Shape)
		if err != nil {
			return err
		}
		dst, err := sdk.View[int32](t)
		if err != nil {
			return err
		}
		for k := range dst {
			dst[k] = a[k] + out.sign*b[k]
		}
	}
	return nil
}

func input(r *sdk.Request, name string) ([]int32, *sdk.Tensor, error) {
	t, err := r.Input(name)
	if err != nil {
		return nil, nil, err
	}
	view, err := sdk.View[int32](t)
	return view, t, err
}

// Close is finalize().
func (i *instance) Close() error {
	sdk.Verbosef("%s is finalized after %d requests", i.name, i.executed)
	return nil
}
