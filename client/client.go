// Package client is a client of the Triton / KServe v2 protocol over gRPC. Package region
// beside it makes the shared memory that its requests can name.
package client

import (
	"context"
	"errors"
	"fmt"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/nereid-serve/nereid/client/region"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
	"github.com/nereid-serve/nereid/tensor"
)

// Client talks to one server. Its methods may be called from any goroutine. Errors of calls
// are gRPC statuses, with the server's own text; see Message.
type Client struct {
	conn *grpc.ClientConn
	// Service has every call of the protocol, for what the methods here do not cover.
	Service inferencepb.GRPCInferenceServiceClient
}

// Dial makes a client for host:port, or unix:path. It connects on the first call.
func Dial(address string) (*Client, error) {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)),
		grpc.WithInitialWindowSize(8<<20), grpc.WithInitialConnWindowSize(16<<20))
	if err != nil {
		return nil, err
	}
	return &Client{conn, inferencepb.NewGRPCInferenceServiceClient(conn)}, nil
}

// Close ends the connection; calls under way fail.
func (c *Client) Close() error { return c.conn.Close() }

// Message is the server's text of a failed call.
func Message(err error) string { return status.Convert(err).Message() }

// Tensor is an input to send or an output received. Its bytes are in Data, or in Region from
// Offset on; ByteSize counts those in a region.
type Tensor struct {
	Name     string
	DataType tensor.DataType
	Shape    tensor.Shape
	Data     []byte // row-major, little-endian; BYTES elements as tensor.AppendBytes has them

	Region   *region.Region
	Offset   uint64
	ByteSize uint64
}

// Request is one inference.
type Request struct {
	Model   string
	Version string // "": the server's version policy decides
	ID      string
	Inputs  []Tensor
	// Outputs are the wanted ones, by name; one with a Region is written there. None: all.
	Outputs []Tensor
	// Parameters are bool, int64, float64 or string.
	Parameters map[string]any
}

// Response is the answer. Outputs in regions have no Data.
type Response struct {
	Model, Version, ID string
	Outputs            []Tensor
}

// Output is the output of that name, nil where there is none.
func (r *Response) Output(name string) *Tensor {
	for i := range r.Outputs {
		if r.Outputs[i].Name == name {
			return &r.Outputs[i]
		}
	}
	return nil
}

// Infer runs one inference. It blocks until the answer; ctx cancels it on the server too.
func (c *Client) Infer(ctx context.Context, r *Request) (*Response, error) {
	in := &inferencepb.ModelInferRequest{ModelName: r.Model, ModelVersion: r.Version, Id: r.ID}
	var err error
	if in.Parameters, err = parameters(r.Parameters); err != nil {
		return nil, err
	}
	for i := range r.Inputs {
		t := &r.Inputs[i]
		m := &inferencepb.ModelInferRequest_InferInputTensor{Name: t.Name, Datatype: t.DataType.String(), Shape: t.Shape}
		if t.Region != nil {
			m.Parameters = t.place()
		} else {
			in.RawInputContents = append(in.RawInputContents, t.Data)
		}
		in.Inputs = append(in.Inputs, m)
	}
	for i := range r.Outputs {
		m := &inferencepb.ModelInferRequest_InferRequestedOutputTensor{Name: r.Outputs[i].Name}
		if r.Outputs[i].Region != nil {
			m.Parameters = r.Outputs[i].place()
		}
		in.Outputs = append(in.Outputs, m)
	}
	out, err := c.Service.ModelInfer(ctx, in)
	if err != nil {
		return nil, err
	}
	response := &Response{Model: out.ModelName, Version: out.ModelVersion, ID: out.Id}
	for i, m := range out.Outputs {
		t := Tensor{Name: m.Name, DataType: tensor.ParseDataType(m.Datatype), Shape: m.Shape}
		if i >= len(out.RawOutputContents) {
			return nil, errors.New("the answer has fewer contents than outputs")
		}
		t.Data = out.RawOutputContents[i]
		response.Outputs = append(response.Outputs, t)
	}
	return response, nil
}

func (t *Tensor) place() map[string]*inferencepb.InferParameter {
	number := func(n uint64) *inferencepb.InferParameter {
		return &inferencepb.InferParameter{ParameterChoice: &inferencepb.InferParameter_Int64Param{Int64Param: int64(n)}}
	}
	out := map[string]*inferencepb.InferParameter{
		"shared_memory_region":    {ParameterChoice: &inferencepb.InferParameter_StringParam{StringParam: t.Region.Name()}},
		"shared_memory_byte_size": number(t.ByteSize),
	}
	if t.Offset > 0 {
		out["shared_memory_offset"] = number(t.Offset)
	}
	return out
}

func parameters(in map[string]any) (map[string]*inferencepb.InferParameter, error) {
	out := map[string]*inferencepb.InferParameter{}
	for key, value := range in {
		p := &inferencepb.InferParameter{}
		switch v := value.(type) {
		case bool:
			p.ParameterChoice = &inferencepb.InferParameter_BoolParam{BoolParam: v}
		case int64:
			p.ParameterChoice = &inferencepb.InferParameter_Int64Param{Int64Param: v}
		case float64:
			p.ParameterChoice = &inferencepb.InferParameter_DoubleParam{DoubleParam: v}
		case string:
			p.ParameterChoice = &inferencepb.InferParameter_StringParam{StringParam: v}
		default:
			return nil, fmt.Errorf("parameter '%s' is a %T; expected bool, int64, float64 or string", key, value)
		}
		out[key] = p
	}
	return out, nil
}

// Register makes a region known to the server under its name.
func (c *Client) Register(ctx context.Context, r *region.Region) error {
	_, err := c.Service.SystemSharedMemoryRegister(ctx, &inferencepb.SystemSharedMemoryRegisterRequest{Name: r.Name(), Key: r.Key(), ByteSize: r.ByteSize()})
	return err
}

// Unregister takes the region of that name from the server; "" takes all of them.
func (c *Client) Unregister(ctx context.Context, name string) error {
	_, err := c.Service.SystemSharedMemoryUnregister(ctx, &inferencepb.SystemSharedMemoryUnregisterRequest{Name: name})
	return err
}
