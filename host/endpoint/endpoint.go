// Package endpoint has what both protocols share: what they ask of the server, how an error
// becomes a status, and how a request is read, run and answered whatever its encoding.
package endpoint

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/host/model"
	"github.com/nereid-serve/nereid/host/modelconfig"
	"github.com/nereid-serve/nereid/host/region"
	"github.com/nereid-serve/nereid/host/stats"
	"github.com/nereid-serve/nereid/internal/protojson"
	configpb "github.com/nereid-serve/nereid/proto/config"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
	"github.com/nereid-serve/nereid/tensor"
)

// Server is what an endpoint asks of the host.
type Server struct {
	Name       string // as in the server's metadata
	Version    string
	Models     *model.Manager
	Regions    *region.Registry
	Explicit   bool        // model control by clients is on
	Ready      func() bool // the server takes requests
	MaxRequest int64       // bytes of one request
}

// Extensions are those of the protocol that the server speaks.
var Extensions = []string{
	"classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
	"model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters", "statistics",
	"trace", "logging",
}

// GRPCCode is the gRPC status of an error's code.
func GRPCCode(err error) codes.Code {
	switch errcode.Of(err) {
	case errcode.Unknown:
		return codes.Unknown
	case errcode.NotFound:
		return codes.NotFound
	case errcode.InvalidArg:
		return codes.InvalidArgument
	case errcode.Unavailable:
		return codes.Unavailable
	case errcode.Unsupported:
		return codes.Unimplemented
	case errcode.AlreadyExists:
		return codes.AlreadyExists
	case errcode.Cancelled:
		return codes.Canceled
	}
	return codes.Internal
}

// HTTPStatus is the HTTP status of an error's code. Source: Triton's http_server.
func HTTPStatus(err error) int {
	switch errcode.Of(err) {
	case errcode.NotFound:
		return http.StatusNotFound
	case errcode.Unavailable:
		return http.StatusServiceUnavailable
	case errcode.Unsupported:
		return http.StatusNotImplemented
	case errcode.Internal:
		return http.StatusInternalServerError
	}
	return http.StatusBadRequest
}

// Fill copies the bytes of a request's inline inputs into place; at is the place of an input.
type Fill func(at func(input int) []byte) error

// Infer checks a request against its model, lets fill put the inline inputs in place, and
// runs it. The caller closes the response; on an error there is none.
func (s *Server) Infer(name, version string, r *infer.Request, fill Fill) (*model.Version, *infer.Response, error) {
	v, err := s.Models.Lookup(name, version)
	if err != nil {
		return nil, nil, err
	}
	defer v.Release()
	if v.Config.GetModelTransactionPolicy().GetDecoupled() {
		return nil, nil, errcode.Errorf(errcode.Unsupported, "ModelInfer RPC doesn't support models with decoupled transaction policy")
	}
	response, err := run(v, r, fill)
	if err != nil {
		return nil, nil, err
	}
	return v, response, nil
}

func run(v *model.Version, r *infer.Request, fill Fill) (*infer.Response, error) {
	if err := place(v, r, fill); err != nil {
		r.Close()
		return nil, err
	}
	r.Received = time.Now()
	response := v.Infer(r)
	if response.Err != nil {
		err := response.Err
		response.Close()
		return nil, err
	}
	return response, nil
}

// place checks the request and puts its inline inputs where the stub reads them.
func place(v *model.Version, r *infer.Request, fill Fill) error {
	byteSize, err := v.Prepare(r)
	if err != nil {
		return err
	}
	data, err := v.LeaseInputs(r, byteSize)
	if err != nil {
		return err
	}
	base := r.Lease()
	err = fill(func(i int) []byte {
		t := &r.Frame.Inputs[i]
		if t.ByteSize == 0 {
			return nil
		}
		offset := t.Offset - base.Offset()
		return data[offset : offset+t.ByteSize]
	})
	if err != nil {
		return err
	}
	v.Stats.CopiedIn.Add(inlineBytes(r))
	return v.CheckInline(r, data)
}

func inlineBytes(r *infer.Request) (n uint64) {
	for i := range r.Inputs {
		n += r.Inputs[i].ByteSize
	}
	return n
}

// Params collects the parameters of a request: those that the server itself understands,
// and the rest, as JSON for the model.
type Params struct {
	request *infer.Request
	json    []byte
}

// NewParams collects for r.
func NewParams(r *infer.Request) *Params { return &Params{request: r} }

// Add takes one parameter; value is a bool, int64, uint64, float64 or string.
// Errors: InvalidArg for a reserved parameter of another type, and for a reserved name.
func (p *Params) Add(key string, value any) error {
	r := p.request
	wrong := func(kind string) error {
		return errcode.Errorf(errcode.InvalidArg, "invalid value type for '%s' parameter, expected %s.", key, kind)
	}
	switch key {
	case "sequence_id":
		switch id := value.(type) {
		case int64:
			r.CorrelationID = uint64(id)
		case uint64:
			r.CorrelationID = id
		case string:
			r.CorrelationText = id
		default:
			return wrong("int64_param or string_param")
		}
	case "sequence_start", "sequence_end":
		on, ok := value.(bool)
		if !ok {
			return wrong("bool_param")
		}
		flag := uint32(1)
		if key == "sequence_end" {
			flag = 2
		}
		if on {
			r.SequenceFlags |= flag
		}
	case "priority", "timeout":
		var n uint64
		switch v := value.(type) {
		case uint64:
			n = v
		case int64:
			if v < 0 {
				return wrong("uint64_param")
			}
			n = uint64(v)
		default:
			return wrong("int64_param")
		}
		if key == "timeout" {
			r.TimeoutMicros = n
		} else {
			r.Priority = uint32(min(n, math.MaxUint32))
		}
	case "binary_data_output":
	case "triton_enable_empty_final_response": // of streams; it says nothing to a unary call
	default:
		if len(key) >= 7 && key[:7] == "triton_" {
			return errcode.Errorf(errcode.InvalidArg, "parameter keys starting with 'triton_' are reserved for Triton usage: '%s'", key)
		}
		return p.addJSON(key, value)
	}
	return nil
}

func (p *Params) addJSON(key string, value any) error {
	separator := byte(',')
	if p.json == nil {
		separator = '{'
	}
	p.json = append(p.json, separator)
	p.json = append(AppendText(p.json, key), ':')
	switch v := value.(type) {
	case bool:
		p.json = strconv.AppendBool(p.json, v)
	case int64:
		p.json = strconv.AppendInt(p.json, v, 10)
	case float64:
		p.json = AppendFloat(p.json, v, 64)
	case string:
		p.json = AppendText(p.json, v)
	default:
		return errcode.Errorf(errcode.InvalidArg, "invalid value type for parameter '%s', expected bool, int64, double or string", key)
	}
	return nil
}

// Done gives the collected parameters to the request.
func (p *Params) Done() {
	if p.json != nil {
		p.request.Parameters = string(append(p.json, '}'))
	}
}

// ServerMetadata answers the call of that name, as the calls below.
func (s *Server) ServerMetadata() *inferencepb.ServerMetadataResponse {
	return &inferencepb.ServerMetadataResponse{Name: s.Name, Version: s.Version, Extensions: Extensions}
}

// ModelReady tells whether a model takes requests; an unknown one does not.
func (s *Server) ModelReady(name, version string) (bool, error) {
	v, err := s.Models.Find(name, version)
	if err != nil {
		if errcode.Of(err) == errcode.InvalidArg {
			return false, err
		}
		return false, nil
	}
	state, _ := v.State()
	return state == model.Ready, nil
}

// ModelMetadata describes inputs and outputs as clients see them. Errors: NotFound.
func (s *Server) ModelMetadata(name, version string) (*inferencepb.ModelMetadataResponse, error) {
	v, err := s.Models.Find(name, version)
	if err != nil {
		return nil, err
	}
	c := v.Config
	out := &inferencepb.ModelMetadataResponse{Name: v.Name, Platform: c.Platform}
	if out.Platform == "" {
		out.Platform = c.Backend
	}
	for _, other := range s.Models.Versions(v.Name) {
		if state, _ := other.State(); state == model.Ready && (version == "" || other == v) {
			out.Versions = append(out.Versions, strconv.FormatInt(other.Number, 10))
		}
	}
	shape := func(dims []int64) []int64 {
		if c.MaxBatchSize > 0 {
			return append([]int64{-1}, dims...)
		}
		return dims
	}
	for _, in := range c.Input {
		out.Inputs = append(out.Inputs, &inferencepb.ModelMetadataResponse_TensorMetadata{Name: in.Name, Datatype: tensor.DataType(in.DataType).String(), Shape: shape(in.Dims)})
	}
	for _, o := range c.Output {
		out.Outputs = append(out.Outputs, &inferencepb.ModelMetadataResponse_TensorMetadata{Name: o.Name, Datatype: tensor.DataType(o.DataType).String(), Shape: shape(o.Dims)})
	}
	return out, nil
}

// ModelConfig is the configuration in force. Errors: NotFound.
func (s *Server) ModelConfig(name, version string) (*configpb.ModelConfig, error) {
	v, err := s.Models.Find(name, version)
	if err != nil {
		return nil, err
	}
	return v.Config, nil
}

// Statistics has the counters of one model version, of all versions of a model, or of all.
// Errors: InvalidArg for what is not live.
func (s *Server) Statistics(name, version string) (*inferencepb.ModelStatisticsResponse, error) {
	out := &inferencepb.ModelStatisticsResponse{}
	for _, v := range s.Models.Versions(name) {
		if state, _ := v.State(); state != model.Ready || version != "" && strconv.FormatInt(v.Number, 10) != version {
			continue
		}
		out.ModelStats = append(out.ModelStats, statistics(v))
	}
	if name != "" && len(out.ModelStats) == 0 {
		if version != "" {
			return nil, errcode.Errorf(errcode.InvalidArg, "requested model version is not available for model '%s', version %s", name, version)
		}
		return nil, errcode.Errorf(errcode.InvalidArg, "requested model '%s' is not available", name)
	}
	return out, nil
}

func statistics(v *model.Version) *inferencepb.ModelStatistics {
	c := v.Stats.Snapshot()
	d := func(d stats.Duration) *inferencepb.StatisticDuration {
		return &inferencepb.StatisticDuration{Count: d.Count, Ns: d.NS}
	}
	out := &inferencepb.ModelStatistics{
		Name: v.Name, Version: strconv.FormatInt(v.Number, 10), InferenceCount: c.InferenceCount, ExecutionCount: c.ExecutionCount,
		InferenceStats: &inferencepb.InferStatistics{
			Success: d(c.Success), Fail: d(c.Fail), Queue: d(c.Queue), ComputeInput: d(c.ComputeInput), ComputeInfer: d(c.ComputeInfer),
			ComputeOutput: d(c.ComputeOutput), CacheHit: d(stats.Duration{}), CacheMiss: d(stats.Duration{}),
		},
	}
	if !c.LastInference.IsZero() {
		out.LastInference = uint64(c.LastInference.UnixMilli())
	}
	for _, b := range c.Batches {
		out.BatchStats = append(out.BatchStats, &inferencepb.InferBatchStatistics{
			BatchSize: b.Size, ComputeInput: d(b.ComputeInput), ComputeInfer: d(b.ComputeInfer), ComputeOutput: d(b.ComputeOutput),
		})
	}
	return out
}

// Index lists models; ready leaves out those that are not.
func (s *Server) Index(repository string, ready bool) (*inferencepb.RepositoryIndexResponse, error) {
	if repository != "" {
		return nil, errcode.Errorf(errcode.Unsupported, "'repository_name' specification is not supported")
	}
	rows, err := s.Models.Index()
	if err != nil {
		return nil, err
	}
	out := &inferencepb.RepositoryIndexResponse{}
	for _, row := range rows {
		if !ready || row.State == model.Ready {
			out.Models = append(out.Models, &inferencepb.RepositoryIndexResponse_ModelIndex{Name: row.Name, Version: row.Version, State: string(row.State), Reason: row.Reason})
		}
	}
	return out, nil
}

// Load and Unload carry model control out. Errors: Unavailable unless it is explicit;
// Unsupported for what a load may carry in Triton and not here.
func (s *Server) Load(ctx context.Context, repository, name string, parameters int) error {
	checked, err := s.control(repository, name, "load")
	if err != nil {
		return err
	}
	if parameters > 0 {
		return errcode.Errorf(errcode.Unsupported, "load of '%s': parameters (config, file overrides) are not supported yet", name)
	}
	return s.Models.Load(ctx, checked)
}

// Unload ends a model. See Load.
func (s *Server) Unload(repository, name string) error {
	checked, err := s.control(repository, name, "unload")
	if err != nil {
		return err
	}
	return s.Models.Unload(checked)
}

func (s *Server) control(repository, name, act string) (modelconfig.ModelName, error) {
	if repository != "" {
		return "", errcode.Errorf(errcode.Unsupported, "'repository_name' specification is not supported")
	}
	if !s.Explicit {
		return "", errcode.Errorf(errcode.Unavailable, "explicit model load / unload is not allowed if polling is enabled, or without --model-control-mode=explicit: %s of '%s'", act, name)
	}
	checked, err := modelconfig.ParseName(name)
	if err != nil && act == "load" {
		return "", errcode.Errorf(errcode.Internal, "failed to load '%s', failed to poll from model repository: %w", name, err)
	}
	return checked, err
}

// NoCUDA is the answer to registering CUDA memory: this server has no GPU support yet.
// The code is Triton's on a machine without a GPU.
func NoCUDA(name string) error {
	return errcode.Errorf(errcode.InvalidArg, "failed to register CUDA shared memory region '%s': this server has no GPU", name)
}

// NoCUDARegion is the answer to a question about a CUDA region.
func NoCUDARegion(name string) error {
	return errcode.Errorf(errcode.NotFound, "Unable to find cuda shared memory region: '%s'", name)
}

// AppendText appends s as a JSON string.
func AppendText(dst []byte, s string) []byte { return protojson.AppendText(dst, s) }

// AppendFloat appends a number as Triton writes it: NaN and infinities bare.
func AppendFloat(dst []byte, n float64, bits int) []byte {
	switch {
	case math.IsNaN(n):
		return append(dst, "NaN"...)
	case math.IsInf(n, 1):
		return append(dst, "Infinity"...)
	case math.IsInf(n, -1):
		return append(dst, "-Infinity"...)
	}
	at := len(dst)
	format := byte('f')
	if a := math.Abs(n); a != 0 && (a < 1e-6 || a >= 1e21) {
		format = 'e'
	}
	dst = strconv.AppendFloat(dst, n, format, -1, bits)
	for _, c := range dst[at:] {
		if c == '.' || c == 'e' {
			return dst
		}
	}
	return append(dst, ".0"...)
}

// Recovered turns a panic of a handler into an error: it ends one request, not the server.
func Recovered(p any) error {
	return errcode.Errorf(errcode.Internal, "internal error: %s", fmt.Sprint(p))
}
