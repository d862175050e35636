package model

import (
	"fmt"
	"slices"
	"strings"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/backend"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/internal/arena"
	"github.com/nereid-serve/nereid/internal/wire"
	configpb "github.com/nereid-serve/nereid/proto/config"
	"github.com/nereid-serve/nereid/tensor"
)

// checks is what requests of one model are held against.
type checks struct {
	model        string
	maxBatchSize int64
	required     int
	inputs       []ioSpec
	outputs      []ioSpec
}

type ioSpec struct {
	name     string
	datatype tensor.DataType
	dims     tensor.Shape // without the batch dimension
	reshape  tensor.Shape // what the backend sees instead; nil: dims
	optional bool
}

func newChecks(c *configpb.ModelConfig) *checks {
	k := &checks{model: c.Name, maxBatchSize: int64(c.MaxBatchSize)}
	for _, in := range c.Input {
		s := ioSpec{name: in.Name, datatype: tensor.DataType(in.DataType), dims: in.Dims, optional: in.Optional}
		if in.Reshape != nil {
			s.reshape = append(tensor.Shape{}, in.Reshape.Shape...)
		}
		if !in.Optional {
			k.required++
		}
		k.inputs = append(k.inputs, s)
	}
	for _, out := range c.Output {
		s := ioSpec{name: out.Name, datatype: tensor.DataType(out.DataType), dims: out.Dims}
		if out.Reshape != nil {
			s.reshape = append(tensor.Shape{}, out.Reshape.Shape...)
		}
		k.outputs = append(k.outputs, s)
	}
	return k
}

func index(specs []ioSpec, name string) int {
	for i := range specs {
		if specs[i].name == name {
			return i
		}
	}
	return -1
}

func (k *checks) outputSpecs() []backend.OutputSpec {
	var out []backend.OutputSpec
	for _, o := range k.outputs {
		shape := func(s tensor.Shape) (tensor.Shape, error) { return slices.Clone(s), nil }
		if o.reshape != nil {
			batched := k.maxBatchSize > 0
			shape = func(s tensor.Shape) (tensor.Shape, error) {
				out, ok := exchange(s, o.reshape, o.dims, batched)
				if !ok {
					return nil, fmt.Errorf("output '%s' has shape %s, which reshape %s forbids", o.name, s, o.reshape)
				}
				return out, nil
			}
		}
		out = append(out, backend.OutputSpec{Name: o.name, Shape: shape})
	}
	return out
}

// exchange turns a shape that fits one pattern into the one that the other pattern gives it:
// each variable dimension of to takes the size of that of from.
func exchange(shape, from, to tensor.Shape, batched bool) (tensor.Shape, bool) {
	var out tensor.Shape
	if batched {
		if len(shape) == 0 {
			return nil, false
		}
		out, shape = append(out, shape[0]), shape[1:]
	}
	if len(shape) != len(from) {
		return nil, false
	}
	var variable []int64
	for i, d := range from {
		if d == -1 {
			variable = append(variable, shape[i])
		} else if d != shape[i] {
			return nil, false
		}
	}
	for _, d := range to {
		if d == -1 {
			if len(variable) == 0 {
				return nil, false
			}
			d, variable = variable[0], variable[1:]
		}
		out = append(out, d)
	}
	return out, true
}

// limits on what one request may bring along; each is far above any real use.
const (
	maxRank              = 64
	maxIDByteSize        = 1<<16 - 1
	maxParameterByteSize = 1 << 20
)

// Prepare checks a request against the model and fills its frame in: the tensors with their
// offsets counted from the beginning of one lease, regions resolved and referenced. byteSize
// is how large the lease for the inline inputs must be. On an error the caller closes the
// request. Errors: InvalidArg, NotFound for an unknown region.
// Source of the order and the texts: Triton's InferenceRequest::Normalize and its tests.
func (v *Version) Prepare(r *infer.Request) (byteSize uint64, err error) {
	k := v.checks
	invalid := func(format string, args ...any) error {
		return errcode.Errorf(errcode.InvalidArg, format, args...)
	}
	if len(r.ID) > maxIDByteSize || len(r.CorrelationText) > maxIDByteSize || len(r.Parameters) > maxParameterByteSize {
		return 0, invalid("request id of %d bytes, or parameters of %d bytes, are too long: at most %d and %d", len(r.ID), len(r.Parameters), maxIDByteSize, maxParameterByteSize)
	}
	if err := v.prepareOutputs(r); err != nil {
		return 0, err
	}
	if n := len(r.Inputs); n < k.required || n > len(k.inputs) {
		return 0, k.wrongCount(r)
	}
	frame := &r.Frame
	frame.Inputs = make([]wire.Tensor, len(r.Inputs))
	for i := range r.Inputs {
		in := &r.Inputs[i]
		at := index(k.inputs, in.Name)
		if at < 0 {
			return 0, invalid("unexpected inference input '%s' for model '%s'", in.Name, k.model)
		}
		for j := range i {
			if r.Inputs[j].Name == in.Name {
				return 0, invalid("input '%s' already exists in request", in.Name)
			}
		}
		spec := &k.inputs[at]
		if in.DataType != spec.datatype {
			return 0, invalid("inference input '%s' data-type is '%s', but model '%s' expects '%s'", in.Name, in.DataType, k.model, spec.datatype)
		}
		shape, err := k.checkShape(r, in, spec, i == 0)
		if err != nil {
			return 0, err
		}
		t := &frame.Inputs[i]
		*t = wire.Tensor{Index: uint16(at), DataType: in.DataType, Shape: shape}
		if in.Region != nil {
			g, offset, err := v.useRegion(r, in.Region)
			if err != nil {
				return 0, err
			}
			t.Segment, t.Offset, t.ByteSize = g.Number, offset, in.Region.ByteSize
		} else {
			t.Offset, t.ByteSize = byteSize, in.ByteSize
			end, ok := tensor.End(byteSize, in.ByteSize, 1<<46)
			if !ok {
				return 0, invalid("inputs of the request are too large")
			}
			byteSize = (end + arena.Align - 1) &^ (arena.Align - 1)
		}
		if size, fixed := tensor.ByteSize(in.DataType, in.Shape); fixed && uint64(size) != t.ByteSize {
			return 0, invalid("input byte size mismatch for input '%s' for model '%s'. Expected %d, got %d", in.Name, k.model, size, t.ByteSize)
		} else if elements, _ := in.Shape.Elements(); !fixed && uint64(elements) > t.ByteSize/4 {
			return 0, invalid("expected %d string elements for inference input '%s', got %d bytes", elements, in.Name, t.ByteSize)
		}
	}
	if len(r.Inputs) < len(k.inputs) { // optional inputs were left out, or a required one
		for i := range k.inputs {
			if !k.inputs[i].optional && !slices.ContainsFunc(r.Inputs, func(in infer.Input) bool { return in.Name == k.inputs[i].name }) {
				return 0, k.wrongCount(r)
			}
		}
	}
	frame.CorrelationID, frame.CorrelationText = r.CorrelationID, r.CorrelationText
	frame.SequenceFlags, frame.Priority, frame.TimeoutMicros = r.SequenceFlags, r.Priority, r.TimeoutMicros
	frame.RequestID, frame.Parameters = r.ID, r.Parameters
	return byteSize, nil
}

func (k *checks) wrongCount(r *infer.Request) error {
	expected := fmt.Sprintf("expected %d inputs", len(k.inputs))
	if k.required != len(k.inputs) {
		expected = fmt.Sprintf("expected number of inputs between %d and %d", k.required, len(k.inputs))
	}
	got := make([]string, 0, len(r.Inputs))
	for _, in := range r.Inputs {
		got = append(got, "'"+in.Name+"'")
	}
	missing := []string{}
	for _, s := range k.inputs {
		if !s.optional && !slices.Contains(got, "'"+s.name+"'") {
			missing = append(missing, "'"+s.name+"'")
		}
	}
	text := fmt.Sprintf("%s but got %d inputs for model '%s'. Got input(s) [%s]", expected, len(r.Inputs), k.model, strings.Join(got, ", "))
	if len(missing) > 0 {
		text += fmt.Sprintf(", but missing required input(s) [%s]. Please provide all required input(s).", strings.Join(missing, ", "))
	}
	return errcode.Errorf(errcode.InvalidArg, "%s", text)
}

// checkShape returns the shape that the backend sees.
func (k *checks) checkShape(r *infer.Request, in *infer.Input, spec *ioSpec, first bool) (tensor.Shape, error) {
	unexpected := func() error {
		expected := spec.dims
		if k.maxBatchSize > 0 {
			expected = append(tensor.Shape{-1}, spec.dims...)
		}
		return errcode.Errorf(errcode.InvalidArg, "unexpected shape for input '%s' for model '%s'. Expected %s, got %s", in.Name, k.model, expected, in.Shape)
	}
	if len(in.Shape) > maxRank {
		return nil, errcode.Errorf(errcode.InvalidArg, "input '%s' has %d dimensions, at most %d are allowed", in.Name, len(in.Shape), maxRank)
	}
	if _, ok := in.Shape.Elements(); !ok {
		return nil, unexpected()
	}
	dims := in.Shape
	if k.maxBatchSize > 0 {
		if len(dims) == 0 {
			return nil, unexpected()
		}
		batch := dims[0]
		dims = dims[1:]
		switch {
		case first:
			r.BatchSize = uint64(batch)
			if batch < 1 || batch > k.maxBatchSize {
				return nil, errcode.Errorf(errcode.InvalidArg, "inference request batch-size must be <= %d for '%s'", k.maxBatchSize, k.model)
			}
		case r.BatchSize != uint64(batch):
			return nil, errcode.Errorf(errcode.InvalidArg, "input '%s' batch size does not match other inputs for '%s'", in.Name, k.model)
		}
	}
	if len(dims) != len(spec.dims) {
		return nil, unexpected()
	}
	for i, d := range spec.dims {
		if d != -1 && d != dims[i] {
			return nil, unexpected()
		}
	}
	if spec.reshape == nil {
		return in.Shape, nil
	}
	shape, ok := exchange(in.Shape, spec.dims, spec.reshape, k.maxBatchSize > 0)
	if !ok {
		return nil, unexpected()
	}
	return shape, nil
}

func (v *Version) prepareOutputs(r *infer.Request) error {
	k, frame := v.checks, &r.Frame
	if len(r.Outputs) == 0 {
		frame.Flags = wire.FlagAllOutputs
		return nil
	}
	// An output asked for twice comes once.
	var once []infer.Output
	for i := range r.Outputs {
		o := &r.Outputs[i]
		at := index(k.outputs, o.Name)
		if at < 0 {
			return errcode.Errorf(errcode.InvalidArg, "unexpected inference output '%s' for model '%s'", o.Name, k.model)
		}
		if slices.ContainsFunc(frame.Outputs, func(p wire.Placement) bool { return p.Index == uint16(at) }) {
			continue
		}
		p := wire.Placement{Index: uint16(at)}
		if o.Region != nil {
			g, offset, err := v.useRegion(r, o.Region)
			if err != nil {
				return err
			}
			p.Placed, p.Segment, p.Offset, p.ByteSize = true, g.Number, offset, o.Region.ByteSize
		}
		frame.Outputs = append(frame.Outputs, p)
		once = append(once, *o)
	}
	r.Outputs = once
	return nil
}

// CheckInline checks the bytes of inline inputs that only their contents can tell: BYTES.
func (v *Version) CheckInline(r *infer.Request, data []byte) error {
	base := r.Lease().Offset()
	for i := range r.Inputs {
		in, t := &r.Inputs[i], &r.Frame.Inputs[i]
		if in.DataType != tensor.Bytes || in.Region != nil {
			continue
		}
		var bytes []byte
		if t.ByteSize > 0 {
			bytes = data[t.Offset-base:][:t.ByteSize]
		}
		elements, _ := in.Shape.Elements()
		if err := tensor.CheckBytes(bytes, elements); err != nil {
			return errcode.Errorf(errcode.InvalidArg, "inference input '%s' for model '%s': %w", in.Name, v.checks.model, err)
		}
	}
	return nil
}
