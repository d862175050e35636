// Package host is the server as a library: Start wires the parts and serves, Shutdown ends
// all of it. It is the only place that wires parts.
package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nereid-serve/nereid/host/endpoint"
	"github.com/nereid-serve/nereid/host/endpoint/grpcv2"
	"github.com/nereid-serve/nereid/host/endpoint/httpv2"
	"github.com/nereid-serve/nereid/host/metrics"
	"github.com/nereid-serve/nereid/host/model"
	"github.com/nereid-serve/nereid/host/modelconfig"
	"github.com/nereid-serve/nereid/host/region"
	"github.com/nereid-serve/nereid/host/repository"
	"github.com/nereid-serve/nereid/host/supervisor"
	configpb "github.com/nereid-serve/nereid/proto/config"
	"github.com/nereid-serve/nereid/stubs/python"
)

// Listen says whether and where an endpoint listens.
type Listen struct {
	Allow   bool
	Address string
	Port    int // 0: a free one
}

// Options of a server. DefaultOptions has the values of the flags' defaults.
type Options struct {
	ID                  string
	ModelRepositories   []string
	HTTP, GRPC, Metrics Listen
	Explicit            bool     // --model-control-mode=explicit
	LoadModels          []string // with Explicit: to load at the start; "*" for all
	StrictReadiness     bool
	ExitTimeout         time.Duration
	BackendDirectories  []string
	BackendConfig       map[string]map[string]string // by backend; "" for all
	InputArenaByteSize  uint64
	OutputArenaByteSize uint64
	MaxRequestByteSize  int64
	StartTimeout        time.Duration
	Logger              *slog.Logger
	LogVerbose          int
	// PythonStub is the program and arguments of the Python stub: this program itself, told so.
	PythonStub []string
}

// Version of the server, as its metadata has it.
const Version = "0.1.0"

// DefaultOptions are tritonserver's defaults, and ours where it has none.
func DefaultOptions() Options {
	return Options{
		ID:   "nereid",
		HTTP: Listen{true, "0.0.0.0", 8000}, GRPC: Listen{true, "0.0.0.0", 8001}, Metrics: Listen{true, "0.0.0.0", 8002},
		StrictReadiness: true, ExitTimeout: 30 * time.Second,
		InputArenaByteSize: 1 << 30, OutputArenaByteSize: 1 << 30, MaxRequestByteSize: 1<<31 - 1,
		StartTimeout: 2 * time.Minute, Logger: slog.Default(),
	}
}

// Host is a running server.
type Host struct {
	options   Options
	models    *model.Manager
	regions   *region.Registry
	python    *python.ForkServers
	endpoints []served
	serving   sync.WaitGroup
	ready     atomic.Bool
	failed    chan error
}

type served struct {
	name     string
	listener net.Listener
	endpoint interface {
		Serve(net.Listener) error
		Stop(context.Context)
	}
}

// Start listens, loads models and serves. The returned Host is not nil also with an error
// that is a *LoadError: some models failed, the others serve.
func Start(ctx context.Context, o Options) (*Host, error) {
	repo, err := repository.Open(o.ModelRepositories)
	if err != nil {
		return nil, err
	}
	h := &Host{options: o, regions: region.New(), failed: make(chan error, 3)}
	h.python = python.NewForkServers(o.Logger, supervisor.Environment())
	h.models = model.New(&model.Options{
		Repository: repo, Regions: h.regions, Launcher: h, Logger: o.Logger, LogVerbose: o.LogVerbose,
		BackendConfig: o.BackendConfig, InputArenaByteSize: o.InputArenaByteSize, OutputArenaByteSize: o.OutputArenaByteSize,
		StartTimeout: o.StartTimeout, DrainTimeout: o.ExitTimeout,
	})
	if err := h.listen(); err != nil {
		h.Shutdown(ctx)
		return nil, err
	}
	for _, s := range h.endpoints {
		h.serving.Go(func() {
			if err := s.endpoint.Serve(s.listener); err != nil {
				h.failed <- fmt.Errorf("%s endpoint: %w", s.name, err)
			}
		})
	}
	err = h.loadAll(ctx, repo)
	h.ready.Store(true)
	return h, err
}

func (h *Host) listen() error {
	shared := &endpoint.Server{
		Name: h.options.ID, Version: Version, Models: h.models, Regions: h.regions, Explicit: h.options.Explicit,
		Ready: h.Ready, MaxRequest: h.options.MaxRequestByteSize,
	}
	open := func(name string, where Listen) (net.Listener, error) {
		l, err := net.Listen("tcp", net.JoinHostPort(where.Address, strconv.Itoa(where.Port)))
		if err != nil {
			return nil, fmt.Errorf("%s endpoint: %w; choose another with --%s-port, or switch it off with --allow-%s=false", name, err, name, name)
		}
		return l, nil
	}
	add := func(name string, where Listen, make func() served) error {
		if !where.Allow {
			return nil
		}
		l, err := open(name, where)
		if err == nil {
			s := make()
			s.name, s.listener = name, l
			h.endpoints = append(h.endpoints, s)
		}
		return err
	}
	return errors.Join(
		add("grpc", h.options.GRPC, func() served { return served{endpoint: grpcv2.New(shared)} }),
		add("http", h.options.HTTP, func() served { return served{endpoint: httpv2.New(shared, h.options.Logger)} }),
		add("metrics", h.options.Metrics, func() served { return served{endpoint: metrics.New(h.models)} }),
	)
}

// LoadError says which models failed to load at the start.
type LoadError struct{ Failed []error }

func (e *LoadError) Error() string { return errors.Join(e.Failed...).Error() }

func (h *Host) loadAll(ctx context.Context, repo *repository.Repository) error {
	var names []modelconfig.ModelName
	wanted := h.options.LoadModels
	if !h.options.Explicit {
		wanted = []string{"*"}
	}
	var failed LoadError
	for _, w := range wanted {
		if w == "*" {
			all, err := repo.Names()
			if err != nil {
				return err
			}
			names = append(names, all...)
			continue
		}
		name, err := modelconfig.ParseName(w)
		if err != nil {
			return fmt.Errorf("--load-model=%s: %w", w, err)
		}
		names = append(names, name)
	}
	var mu sync.Mutex
	var loading sync.WaitGroup
	for _, name := range names {
		loading.Go(func() {
			if err := h.models.Load(ctx, name); err != nil {
				mu.Lock()
				failed.Failed = append(failed.Failed, err)
				mu.Unlock()
			}
		})
	}
	loading.Wait()
	if len(failed.Failed) > 0 {
		return &failed
	}
	return nil
}

// Spec says how to start the stub of a model. It implements model.Launcher.
func (h *Host) Spec(c *configpb.ModelConfig, version int64, directory string) (supervisor.Spec, error) {
	title := c.Name + "/" + strconv.FormatInt(version, 10)
	if c.Backend == "python" {
		interpreter, err := python.Interpreter(c.Parameters["EXECUTION_ENV_PATH"].GetStringValue(), directory)
		if err != nil {
			return supervisor.Spec{}, err
		}
		connection, err := h.python.Connect(interpreter)
		if err != nil {
			return supervisor.Spec{}, err
		}
		return supervisor.Spec{Path: h.options.PythonStub[0], Args: append(slices.Clone(h.options.PythonStub[1:]), title), Files: []*os.File{connection}}, nil
	}
	folders := append([]string{filepath.Join(directory, strconv.FormatInt(version, 10)), directory, filepath.Dir(directory)}, h.options.BackendDirectories...)
	path, err := supervisor.FindBinary(c.Backend, folders)
	if err != nil {
		return supervisor.Spec{}, err
	}
	return supervisor.Spec{Path: path, Args: []string{title}}, nil
}

// Ready tells whether the server takes requests: with strict readiness, whether every model
// that was asked for is ready.
func (h *Host) Ready() bool {
	return h.ready.Load() && (!h.options.StrictReadiness || h.models.AllReady())
}

// Addresses are where the endpoints listen, by name: grpc, http, metrics.
func (h *Host) Addresses() map[string]string {
	out := map[string]string{}
	for _, s := range h.endpoints {
		out[s.name] = s.listener.Addr().String()
	}
	return out
}

// Models is the table of models: names, versions, states, reasons.
func (h *Host) Models() ([]model.IndexRow, error) { return h.models.Index() }

// Failed yields an error when an endpoint ends by itself.
func (h *Host) Failed() <-chan error { return h.failed }

// Shutdown says not ready, takes no more connections, waits for requests under way until ctx
// ends, and ends stubs and everything else.
func (h *Host) Shutdown(ctx context.Context) {
	h.ready.Store(false)
	h.models.StopLoading()
	var stopping sync.WaitGroup
	for _, s := range h.endpoints {
		if s.name != "metrics" {
			stopping.Go(func() { s.endpoint.Stop(ctx) })
		}
	}
	stopping.Wait()
	h.models.Close(ctx)
	h.python.Close()
	h.regions.Close()
	for _, s := range h.endpoints {
		if s.name == "metrics" {
			s.endpoint.Stop(ctx)
		}
	}
	h.serving.Wait()
}

// BackendSetting is one --backend-config=<backend>,<key>=<value>.
func BackendSetting(text string) (backend, key, value string, err error) {
	backend, setting, ok := strings.Cut(text, ",")
	if !ok {
		backend, setting = "", text
	}
	if key, value, ok = strings.Cut(setting, "="); !ok || key == "" {
		return "", "", "", fmt.Errorf("--backend-config=%s: expected <backend>,<setting>=<value>", text)
	}
	return backend, key, value, nil
}
