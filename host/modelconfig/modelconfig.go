// Package modelconfig reads a model's configuration, fills defaults in and checks it.
package modelconfig

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/prototext"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/protojson"
	configpb "github.com/nereid-serve/nereid/proto/config"
	"github.com/nereid-serve/nereid/tensor"
)

// MaxNameByteSize bounds the name of a model.
const MaxNameByteSize = 255

// ModelName is the name of a model that is safe as a file name and on a command line. Only
// ParseName makes one.
type ModelName string

var badName = regexp.MustCompile("[/\\\\\x00-\x1f\x7f]")

// ParseName checks a name from a client, a repository or a configuration.
// Errors: InvalidArg.
func ParseName(name string) (ModelName, error) {
	switch {
	case name == "":
		return "", errcode.Errorf(errcode.InvalidArg, "model name must not be empty")
	case len(name) > MaxNameByteSize:
		return "", errcode.Errorf(errcode.InvalidArg, "model name has %d bytes, at most %d are allowed", len(name), MaxNameByteSize)
	case name == "." || name == ".." || badName.MatchString(name):
		return "", errcode.Errorf(errcode.InvalidArg, "model name %q must be a plain file name", name)
	}
	return ModelName(name), nil
}

// Parse reads the text of a config.pbtxt. Errors name the line.
func Parse(text []byte) (*configpb.ModelConfig, error) {
	c := &configpb.ModelConfig{}
	if err := prototext.Unmarshal(text, c); err != nil {
		// protobuf varies a space in its messages on purpose; clients may compare them.
		return nil, errcode.Errorf(errcode.InvalidArg, "failed to parse config.pbtxt: %s", strings.ReplaceAll(err.Error(), "\u00a0", " "))
	}
	return c, nil
}

// Normalize fills defaults in, as the server shows them: the configuration of the model in
// the folder of that name. Source: Triton's model configuration document.
func Normalize(c *configpb.ModelConfig, folder ModelName) error {
	if c.Name == "" {
		c.Name = string(folder)
	}
	if c.Name != string(folder) {
		return errcode.Errorf(errcode.InvalidArg, "unexpected directory name '%s' for model '%s', directory name must equal model name", folder, c.Name)
	}
	if c.Backend == "" && c.Platform != "" && c.Platform != "ensemble" {
		c.Backend = strings.SplitN(c.Platform, "_", 2)[0]
	}
	if c.VersionPolicy == nil {
		c.VersionPolicy = &configpb.ModelVersionPolicy{}
	}
	if c.VersionPolicy.PolicyChoice == nil {
		c.VersionPolicy.PolicyChoice = &configpb.ModelVersionPolicy_Latest_{Latest: &configpb.ModelVersionPolicy_Latest{NumVersions: 1}}
	}
	if l := c.VersionPolicy.GetLatest(); l != nil && l.NumVersions == 0 {
		l.NumVersions = 1
	}
	if c.DefaultModelFilename == "" && c.Backend == "python" {
		c.DefaultModelFilename = "model.py"
	}
	if c.Optimization == nil {
		c.Optimization = &configpb.ModelOptimizationPolicy{
			InputPinnedMemory:  &configpb.ModelOptimizationPolicy_PinnedMemoryBuffer{Enable: true},
			OutputPinnedMemory: &configpb.ModelOptimizationPolicy_PinnedMemoryBuffer{Enable: true},
		}
	}
	if c.GetEnsembleScheduling() == nil {
		if len(c.InstanceGroup) == 0 {
			c.InstanceGroup = []*configpb.ModelInstanceGroup{{}}
		}
		for i, g := range c.InstanceGroup {
			if g.Name == "" {
				g.Name = fmt.Sprintf("%s_%d", c.Name, i)
			}
			if g.Count == 0 {
				g.Count = 1
			}
			if g.Kind == configpb.ModelInstanceGroup_KIND_AUTO {
				g.Kind = configpb.ModelInstanceGroup_KIND_CPU
			}
		}
	} else if c.Platform == "" {
		c.Platform = "ensemble"
	}
	return nil
}

// maxInstances bounds the instances of one model: each is a process for Python.
const maxInstances = 1024

// Validate checks what the server itself relies on. Errors: InvalidArg, with the field.
func Validate(c *configpb.ModelConfig) error {
	fail := func(format string, args ...any) error {
		return errcode.Errorf(errcode.InvalidArg, format+" for '%s'", append(args, c.Name)...)
	}
	if c.Backend == "" && c.Platform == "" {
		return fail("must specify 'platform' or 'backend'")
	}
	if c.Backend != "" && (filepath.Base(c.Backend) != c.Backend || c.Backend == "." || c.Backend == ".." || badName.MatchString(c.Backend)) {
		return fail("backend: %q must be a plain name", c.Backend)
	}
	if c.MaxBatchSize < 0 {
		return fail("max_batch_size: %d must be non-negative", c.MaxBatchSize)
	}
	count := int32(0)
	for i, g := range c.InstanceGroup {
		if g.Count < 0 || g.Count > maxInstances || count+g.Count > maxInstances {
			return fail("instance_group[%d].count: %d, at most %d instances are allowed", i, g.Count, maxInstances)
		}
		count += g.Count
		if g.Kind == configpb.ModelInstanceGroup_KIND_GPU {
			return fail("instance_group[%d].kind: KIND_GPU is not supported by this server", i)
		}
	}
	if len(c.Input) > 4096 || len(c.Output) > 4096 {
		return fail("%d inputs and %d outputs, at most 4096 each are allowed", len(c.Input), len(c.Output))
	}
	seen := map[string]bool{}
	for i, in := range c.Input {
		if err := validTensor(in.Name, in.DataType, in.Dims, in.Reshape); err != nil || seen[in.Name] {
			return fail("input[%d] '%s': %s", i, in.Name, reason(err))
		}
		seen[in.Name] = true
	}
	clear(seen)
	for i, out := range c.Output {
		if err := validTensor(out.Name, out.DataType, out.Dims, out.Reshape); err != nil || seen[out.Name] {
			return fail("output[%d] '%s': %s", i, out.Name, reason(err))
		}
		seen[out.Name] = true
	}
	return nil
}

func reason(err error) string {
	if err == nil {
		return "the name is used twice"
	}
	return err.Error()
}

func validTensor(name string, datatype configpb.DataType, dims []int64, reshape *configpb.ModelTensorReshape) error {
	switch {
	case name == "":
		return fmt.Errorf("name must be specified")
	case !tensor.DataType(datatype).Valid():
		return fmt.Errorf("data_type must be specified")
	case len(dims) == 0:
		return fmt.Errorf("dims must be specified")
	case len(dims) > 200:
		return fmt.Errorf("dims has %d entries, at most 200 are allowed", len(dims))
	}
	check := func(field string, dims []int64) error {
		for _, d := range dims {
			if d < -1 || d == 0 && field == "dims" {
				return fmt.Errorf("%s %s: each must be an integer >= 1, or -1 for a variable size", field, tensor.Shape(dims))
			}
		}
		return nil
	}
	if err := check("dims", dims); err != nil || reshape == nil {
		return err
	}
	if err := check("reshape", reshape.Shape); err != nil {
		return err
	}
	// Each variable dimension of one stands for that of the other, in order; what is between
	// them must have as many elements.
	a, okA := segments(dims)
	b, okB := segments(reshape.Shape)
	if !okA || !okB || !slices.Equal(a, b) {
		return fmt.Errorf("reshape %s has different size than dims %s", tensor.Shape(reshape.Shape), tensor.Shape(dims))
	}
	return nil
}

// segments are the products of the dimensions before, between and after the variable ones.
func segments(dims []int64) (out []int64, ok bool) {
	run := tensor.Shape{}
	for _, d := range append(slices.Clone(dims), -1) {
		if d != -1 {
			run = append(run, d)
			continue
		}
		n, ok := run.Elements()
		if !ok {
			return nil, false
		}
		out, run = append(out, n), run[:0]
	}
	return out, true
}

// NotCarriedOut lists the parts of a configuration that the server keeps and shows, but does
// not act on.
func NotCarriedOut(c *configpb.ModelConfig) []string {
	var out []string
	note := func(when bool, what string) {
		if when {
			out = append(out, what)
		}
	}
	note(c.GetDynamicBatching() != nil, "dynamic_batching (each request is an execution of its own)")
	note(c.GetSequenceBatching() != nil, "sequence_batching (requests are run without control inputs, on any instance)")
	note(c.GetModelTransactionPolicy().GetDecoupled(), "model_transaction_policy.decoupled (ModelStreamInfer is not supported)")
	note(c.GetResponseCache().GetEnable(), "response_cache")
	note(len(c.ModelWarmup) > 0, "model_warmup")
	note(len(c.BatchInput)+len(c.BatchOutput) > 0, "batch_input, batch_output")
	note(len(c.GetModelRepositoryAgents().GetAgents()) > 0, "model_repository_agents")
	for _, g := range c.InstanceGroup {
		note(g.RateLimiter != nil, "instance_group.rate_limiter")
	}
	for _, o := range c.Output {
		note(o.LabelFilename != "", "label_filename")
	}
	return slices.Compact(out)
}

// JSON is the configuration as Triton's HTTP endpoint and args["model_config"] have it.
func JSON(c *configpb.ModelConfig) []byte { return protojson.Append(nil, c) }
