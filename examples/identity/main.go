// Identity is the smallest backend: each output is the input of the same number.
package main

import (
	"context"
	"strings"

	"github.com/nereid-serve/nereid/sdk"
)

func main() {
	sdk.Serve(sdk.Each(func(_ context.Context, r *sdk.Request) error {
		for _, in := range r.Inputs() {
			name := strings.Replace(in.Name, "INPUT", "OUTPUT", 1)
			out, err := r.OutputRaw(name, in.DataType, in.Shape, len(in.Data()))
			if err != nil {
				return err
			}
			copy(out.Data(), in.Data())
		}
		return nil
	}))
}
