// Package httpv2 is the HTTP endpoint: KServe v2 and Triton's extensions as JSON and binary
// tensor data.
package httpv2

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/endpoint"
	"github.com/nereid-serve/nereid/internal/protojson"
)

const (
	maxHeaderByteSize = 64 << 10
	headerTimeout     = 30 * time.Second
	// maxControlByteSize bounds the body of every call but infer.
	maxControlByteSize = 16 << 20
)

// Endpoint serves HTTP on one listener.
type Endpoint struct {
	server *endpoint.Server
	http   *http.Server
	logger *slog.Logger
}

// New makes the endpoint; Serve starts it.
func New(s *endpoint.Server, logger *slog.Logger) *Endpoint {
	e := &Endpoint{server: s, logger: logger}
	mux := http.NewServeMux()
	for pattern, handle := range e.routes() {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { e.serve(w, r, handle) })
	}
	e.http = &http.Server{
		Handler: mux, MaxHeaderBytes: maxHeaderByteSize, ReadHeaderTimeout: headerTimeout,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
	}
	return e
}

// Serve answers until Stop.
func (e *Endpoint) Serve(l net.Listener) error {
	if err := e.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Stop ends the listener, waits for calls under way until ctx ends, and then cuts them off.
func (e *Endpoint) Stop(ctx context.Context) {
	if e.http.Shutdown(ctx) != nil {
		e.http.Close()
	}
}

type handler func(w http.ResponseWriter, r *http.Request) error

// routes are all paths with their methods.
func (e *Endpoint) routes() map[string]handler {
	routes := map[string]handler{
		"GET /v2/health/live":  e.live,
		"GET /v2/health/ready": e.ready,
		"GET /v2":              e.metadata,
		"GET /v2/{$}":          e.metadata,
		"GET /v2/models/stats": e.statistics,

		"POST /v2/repository/index":                 e.index,
		"POST /v2/repository/models/{model}/load":   e.load,
		"POST /v2/repository/models/{model}/unload": e.unload,

		"GET /v2/systemsharedmemory/status":                      e.regionStatus,
		"GET /v2/systemsharedmemory/region/{region}/status":      e.regionStatus,
		"POST /v2/systemsharedmemory/region/{region}/register":   e.regionRegister,
		"POST /v2/systemsharedmemory/unregister":                 e.regionUnregister,
		"POST /v2/systemsharedmemory/region/{region}/unregister": e.regionUnregister,
		"GET /v2/cudasharedmemory/status":                        e.cudaStatus,
		"GET /v2/cudasharedmemory/region/{region}/status":        e.cudaStatus,
		"POST /v2/cudasharedmemory/region/{region}/register":     e.cudaRegister,
		"POST /v2/cudasharedmemory/unregister":                   e.empty,
		"POST /v2/cudasharedmemory/region/{region}/unregister":   e.empty,

		"GET /v2/logging":        notYet("the logging extension"),
		"POST /v2/logging":       notYet("the logging extension"),
		"GET /v2/trace/setting":  notYet("the trace extension"),
		"POST /v2/trace/setting": notYet("the trace extension"),
	}
	for _, base := range []string{"/v2/models/{model}", "/v2/models/{model}/versions/{version}"} {
		routes["GET "+base] = e.modelMetadata
		routes["GET "+base+"/ready"] = e.modelReady
		routes["GET "+base+"/config"] = e.modelConfig
		routes["GET "+base+"/stats"] = e.statistics
		routes["POST "+base+"/infer"] = e.infer
		routes["POST "+base+"/generate"] = notYet("the generate extension")
		routes["POST "+base+"/generate_stream"] = notYet("the generate extension")
		routes["GET "+base+"/trace/setting"] = notYet("the trace extension")
		routes["POST "+base+"/trace/setting"] = notYet("the trace extension")
	}
	return routes
}

func notYet(what string) handler {
	return func(http.ResponseWriter, *http.Request) error {
		return errcode.Errorf(errcode.Unsupported, "%s is not supported yet", what)
	}
}

// serve turns a handler's error into Triton's form, and its panic into an error.
func (e *Endpoint) serve(w http.ResponseWriter, r *http.Request, handle handler) {
	started := &tracked{ResponseWriter: w}
	defer func() {
		if p := recover(); p != nil {
			e.logger.Error("handler panicked", "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
			if !started.begun {
				fail(w, endpoint.Recovered(p))
			}
		}
	}()
	if err := handle(started, r); err != nil && err != errClientGone && !started.begun {
		fail(w, err)
	}
}

// tracked knows whether an answer has begun.
type tracked struct {
	http.ResponseWriter
	begun bool
}

func (t *tracked) Write(b []byte) (int, error) { t.begun = true; return t.ResponseWriter.Write(b) }
func (t *tracked) WriteHeader(status int)      { t.begun = true; t.ResponseWriter.WriteHeader(status) }

func fail(w http.ResponseWriter, err error) {
	for _, h := range []string{"Content-Encoding", "Content-Length", headerLength} {
		w.Header().Del(h)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(endpoint.HTTPStatus(err))
	_, _ = w.Write(append(endpoint.AppendText([]byte(`{"error":`), err.Error()), '}'))
}

func send(w http.ResponseWriter, r *http.Request, body []byte) error {
	w.Header().Set("Content-Type", "application/json")
	out := writer(w, r, len(body))
	_, err := out.Write(body)
	if closeErr := out.Close(); err != nil || closeErr != nil {
		return errClientGone
	}
	return nil
}

func sendMessage(w http.ResponseWriter, r *http.Request, m proto.Message) error {
	return send(w, r, protojson.Append(nil, m))
}

func (e *Endpoint) live(w http.ResponseWriter, _ *http.Request) error {
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) empty(w http.ResponseWriter, _ *http.Request) error {
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) ready(w http.ResponseWriter, _ *http.Request) error {
	if !e.server.Ready() {
		w.WriteHeader(http.StatusBadRequest)
		return nil
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) modelReady(w http.ResponseWriter, r *http.Request) error {
	ready, err := e.server.ModelReady(r.PathValue("model"), r.PathValue("version"))
	if err != nil {
		return pathFault(err)
	}
	if !ready {
		return errcode.Errorf(errcode.InvalidArg, "Model version not ready")
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) metadata(w http.ResponseWriter, r *http.Request) error {
	return sendMessage(w, r, e.server.ServerMetadata())
}

func (e *Endpoint) modelMetadata(w http.ResponseWriter, r *http.Request) error {
	out, err := e.server.ModelMetadata(r.PathValue("model"), r.PathValue("version"))
	if err != nil {
		return pathFault(err)
	}
	return sendMessage(w, r, out)
}

func (e *Endpoint) modelConfig(w http.ResponseWriter, r *http.Request) error {
	out, err := e.server.ModelConfig(r.PathValue("model"), r.PathValue("version"))
	if err != nil {
		return pathFault(err)
	}
	return sendMessage(w, r, out)
}

func (e *Endpoint) statistics(w http.ResponseWriter, r *http.Request) error {
	out, err := e.server.Statistics(r.PathValue("model"), r.PathValue("version"))
	if err != nil {
		return err
	}
	return sendMessage(w, r, out)
}

// object reads the JSON object that a control call may have for a body.
func object(w http.ResponseWriter, r *http.Request, into any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxControlByteSize))
	if err != nil {
		return readFault(err)
	}
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return malformed("%v", err)
	}
	return nil
}

func (e *Endpoint) index(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Ready bool `json:"ready"`
	}
	if err := object(w, r, &in); err != nil {
		return err
	}
	out, err := e.server.Index("", in.Ready)
	if err != nil {
		return err
	}
	body := []byte{'['}
	for i, m := range out.Models {
		if i > 0 {
			body = append(body, ',')
		}
		body = endpoint.AppendText(append(body, `{"name":`...), m.Name)
		for _, field := range []struct{ key, value string }{{"version", m.Version}, {"state", m.State}, {"reason", m.Reason}} {
			if field.value != "" {
				body = append(endpoint.AppendText(append(body, ','), field.key), ':')
				body = endpoint.AppendText(body, field.value)
			}
		}
		body = append(body, '}')
	}
	return send(w, r, append(body, ']'))
}

func (e *Endpoint) load(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Parameters map[string]json.RawMessage `json:"parameters"`
	}
	if err := object(w, r, &in); err != nil {
		return err
	}
	if err := e.server.Load(context.WithoutCancel(r.Context()), "", r.PathValue("model"), len(in.Parameters)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) unload(w http.ResponseWriter, r *http.Request) error {
	var in struct{}
	if err := object(w, r, &in); err != nil {
		return err
	}
	if err := e.server.Unload("", r.PathValue("model")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) regionStatus(w http.ResponseWriter, r *http.Request) error {
	regions, err := e.server.Regions.Status(r.PathValue("region"))
	if err != nil {
		return err
	}
	body := []byte{'['}
	for i, g := range regions {
		if i > 0 {
			body = append(body, ',')
		}
		body = endpoint.AppendText(append(body, `{"name":`...), g.Name)
		body = endpoint.AppendText(append(body, `,"key":`...), g.Key)
		body = strconv.AppendUint(append(body, `,"offset":`...), g.Offset, 10)
		body = strconv.AppendUint(append(body, `,"byte_size":`...), g.ByteSize, 10)
		body = append(body, '}')
	}
	return send(w, r, append(body, ']'))
}

func (e *Endpoint) regionRegister(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Key      *string `json:"key"`
		Offset   uint64  `json:"offset"`
		ByteSize *uint64 `json:"byte_size"`
	}
	if err := object(w, r, &in); err != nil {
		return err
	}
	if in.Key == nil {
		return missing("key")
	}
	if in.ByteSize == nil {
		return missing("byte_size")
	}
	if err := e.server.Regions.Register(r.PathValue("region"), *in.Key, in.Offset, *in.ByteSize); err != nil {
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) regionUnregister(w http.ResponseWriter, r *http.Request) error {
	e.server.Regions.Unregister(r.PathValue("region"))
	w.WriteHeader(http.StatusOK)
	return nil
}

func (e *Endpoint) cudaStatus(w http.ResponseWriter, r *http.Request) error {
	if name := r.PathValue("region"); name != "" {
		return endpoint.NoCUDARegion(name)
	}
	return send(w, r, []byte("[]"))
}

func (e *Endpoint) cudaRegister(_ http.ResponseWriter, r *http.Request) error {
	return endpoint.NoCUDA(r.PathValue("region"))
}
