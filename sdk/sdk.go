// Package sdk is what the author of a backend in Go imports.
//
// A backend is a program: it implements Backend and calls Serve from main. The host starts
// it once for each version of each model that names it, in a process of its own.
//
//	type Backend  makes a Model     once a process
//	type Model    makes an Instance for each instance of the model's instance_group
//	type Instance executes          one execution at a time; instances run side by side
//
// Optional abilities are small interfaces: a Model or Instance that has Close() error is
// told when it is no longer needed. Inputs are views of memory that the host filled, or of
// the client's own shared memory; outputs are written where the client or the host reads
// them. Nothing is copied on the way unless the author does.
//
// The smallest backend is examples/identity. Package sdktest drives a backend in a test.
package sdk

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/stubproc"
	"github.com/nereid-serve/nereid/tensor"
)

// Backend runs models of one kind.
type Backend interface {
	// LoadModel makes the model. ctx ends when the host gives up waiting.
	// The error's text is the reason that the server shows for the model.
	LoadModel(ctx context.Context, info *ModelInfo) (Model, error)
}

// Model is one version of one model. If it is an io.Closer, Close is called after the last
// instance was closed.
type Model interface {
	// NewInstance makes one instance. Instances are made one after another.
	NewInstance(ctx context.Context, info *InstanceInfo) (Instance, error)
}

// Instance executes requests. If it is an io.Closer, Close is called after its last execution.
type Instance interface {
	// Execute answers every request of one execution. It writes outputs with
	// Request.Output and may fail single requests with Request.Fail. When it returns nil,
	// the requests that have not failed are answered with the outputs they were given; an
	// error fails every one of them, with the error's code (errcode), Internal without one.
	// Requests and tensors must not be used after Execute returned.
	//
	// ctx ends when no client waits for any of the requests any more.
	Execute(ctx context.Context, requests []*Request) error
}

// ModelInfo says which model to load and where its files are.
type ModelInfo struct {
	Name    string
	Version int64
	// Directory is the model's folder, VersionDirectory the version's; both are absolute.
	Directory        string
	VersionDirectory string
	Config           Config
	// BackendConfig has the settings from --backend-config=<backend>,<key>=<value>.
	BackendConfig map[string]string
}

// Config is the part of the model configuration that most backends need. JSON has all of it.
type Config struct {
	MaxBatchSize int64             `json:"max_batch_size"`
	Inputs       []TensorConfig    `json:"input"`
	Outputs      []TensorConfig    `json:"output"`
	Parameters   map[string]string `json:"-"`
	JSON         json.RawMessage   `json:"-"`
}

// TensorConfig describes one input or output of a model.
type TensorConfig struct {
	Name     string       `json:"name"`
	DataType string       `json:"data_type"` // as in a configuration: "TYPE_FP32"
	Dims     tensor.Shape `json:"dims"`      // -1 for any size; without the batch dimension
	Optional bool         `json:"optional"`
}

func parseConfig(text string) (Config, error) {
	c := Config{JSON: json.RawMessage(text), Parameters: map[string]string{}}
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return c, fmt.Errorf("model configuration: %w", err)
	}
	var wrapped struct {
		Parameters map[string]struct {
			Text string `json:"string_value"`
		} `json:"parameters"`
	}
	if err := json.Unmarshal([]byte(text), &wrapped); err != nil {
		return c, fmt.Errorf("model configuration: %w", err)
	}
	for key, value := range wrapped.Parameters {
		c.Parameters[key] = value.Text
	}
	return c, nil
}

// InstanceInfo says which instance to make.
type InstanceInfo struct {
	Name     string // "<group>_<device>", such as "simple_0_0"
	Kind     string // "KIND_CPU", "KIND_GPU" or "KIND_MODEL"
	DeviceID int
}

// Each is a backend without state that answers one request at a time.
func Each(execute func(ctx context.Context, r *Request) error) Backend { return each(execute) }

type each func(ctx context.Context, r *Request) error

func (e each) LoadModel(context.Context, *ModelInfo) (Model, error) { return e, nil }

func (e each) NewInstance(context.Context, *InstanceInfo) (Instance, error) { return e, nil }

func (e each) Execute(ctx context.Context, requests []*Request) error {
	for _, r := range requests {
		if err := e(ctx, r); err != nil {
			r.Fail(err)
		}
	}
	return nil
}

// Serve runs the backend until the host ends the process. It is the last call of main.
// Started by hand, the program says what it is and ends with status 2.
func Serve(b Backend) {
	stubproc.Serve(func(*stubproc.Host) stubproc.Handler { return NewStub(b) })
}

// Infof writes to the server's log, under the model's name.
func Infof(format string, args ...any) {
	stubproc.Log(stubproc.LevelInfo, fmt.Sprintf(format, args...))
}

// Warnf writes a warning to the server's log.
func Warnf(format string, args ...any) {
	stubproc.Log(stubproc.LevelWarning, fmt.Sprintf(format, args...))
}

// Errorf writes an error to the server's log. To fail a request, return an error instead.
func Errorf(format string, args ...any) {
	stubproc.Log(stubproc.LevelError, fmt.Sprintf(format, args...))
}

// Verbosef writes a line that the server logs with --log-verbose=1.
func Verbosef(format string, args ...any) {
	stubproc.Log(stubproc.LevelVerbose, fmt.Sprintf(format, args...))
}

func closeIf(v any) error {
	if c, ok := v.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

func invalidf(format string, args ...any) error {
	return errcode.Errorf(errcode.InvalidArg, format, args...)
}
