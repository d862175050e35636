// Package grpcv2 is the gRPC endpoint: inference.GRPCInferenceService, health and reflection.
package grpcv2

import (
	"context"
	"math"
	"net"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/endpoint"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
)

// Endpoint serves gRPC on one listener.
type Endpoint struct{ server *grpc.Server }

// New makes the endpoint; Serve starts it.
func New(s *endpoint.Server) *Endpoint {
	g := grpc.NewServer(
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxRecvMsgSize(int(min(s.MaxRequest, math.MaxInt32))),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10),
		// Windows that fit a large tensor: the default of 64 KiB costs a round trip for each.
		grpc.InitialWindowSize(8<<20), grpc.InitialConnWindowSize(16<<20),
		grpc.NumStreamWorkers(32),
		grpc.UnaryInterceptor(recovered),
	)
	e := &service{server: s}
	g.RegisterService(&serviceDesc, e)
	healthpb.RegisterHealthServer(g, &health{server: s})
	reflection.Register(g)
	return &Endpoint{g}
}

// Serve answers until Stop. Source of the options' meaning: google.golang.org/grpc.
func (e *Endpoint) Serve(l net.Listener) error { return e.server.Serve(l) }

// Stop ends the listener, waits for calls under way until ctx ends, and then cuts them off.
func (e *Endpoint) Stop(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		e.server.GracefulStop()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		e.server.Stop() // handlers that go on answer nobody; GracefulStop returns after them
	}
}

// recovered keeps a panic of a handler from ending the server.
func recovered(ctx context.Context, in any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (out any, err error) {
	defer func() {
		if p := recover(); p != nil {
			debug.PrintStack()
			err = failed(endpoint.Recovered(p))
		}
	}()
	return handler(ctx, in)
}

func failed(err error) error { return status.Error(endpoint.GRPCCode(err), err.Error()) }

// serviceDesc is the generated description with a ModelInfer of our own: its messages are
// the codec's.
var serviceDesc = func() grpc.ServiceDesc {
	d := inferencepb.GRPCInferenceService_ServiceDesc
	d.Methods = append([]grpc.MethodDesc(nil), d.Methods...)
	for i := range d.Methods {
		if d.Methods[i].MethodName == "ModelInfer" {
			d.Methods[i].Handler = modelInfer
		}
	}
	return d
}()

type service struct {
	inferencepb.UnimplementedGRPCInferenceServiceServer
	server *endpoint.Server
}

func modelInfer(srv any, ctx context.Context, dec func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
	in := &inferRequest{}
	err := dec(in)
	defer in.free()
	if err != nil {
		return nil, err
	}
	return interceptor(ctx, in, modelInferInfo, srv.(*service).infer)
}

var modelInferInfo = &grpc.UnaryServerInfo{FullMethod: inferencepb.GRPCInferenceService_ModelInfer_FullMethodName}

func (s *service) infer(ctx context.Context, message any) (any, error) {
	in := message.(*inferRequest)
	in.request.Ctx = ctx
	if err := in.settle(); err != nil {
		// Triton looks the model up before it looks at the data.
		if _, unknown := s.server.Models.Find(in.model, in.version); unknown != nil {
			err = unknown
		}
		return nil, failed(err)
	}
	v, response, err := s.server.Infer(in.model, in.version, &in.request, in.fill)
	if err != nil {
		return nil, failed(err)
	}
	return &inferResponse{model: v.Name, version: v.Number, id: in.request.ID, response: response, copied: &v.Stats.CopiedOut}, nil
}

func (s *service) ServerLive(context.Context, *inferencepb.ServerLiveRequest) (*inferencepb.ServerLiveResponse, error) {
	return &inferencepb.ServerLiveResponse{Live: true}, nil
}

func (s *service) ServerReady(context.Context, *inferencepb.ServerReadyRequest) (*inferencepb.ServerReadyResponse, error) {
	return &inferencepb.ServerReadyResponse{Ready: s.server.Ready()}, nil
}

func (s *service) ModelReady(_ context.Context, in *inferencepb.ModelReadyRequest) (*inferencepb.ModelReadyResponse, error) {
	ready, err := s.server.ModelReady(in.Name, in.Version)
	if err != nil {
		return nil, failed(err)
	}
	return &inferencepb.ModelReadyResponse{Ready: ready}, nil
}

func (s *service) ServerMetadata(context.Context, *inferencepb.ServerMetadataRequest) (*inferencepb.ServerMetadataResponse, error) {
	return s.server.ServerMetadata(), nil
}

func (s *service) ModelMetadata(_ context.Context, in *inferencepb.ModelMetadataRequest) (*inferencepb.ModelMetadataResponse, error) {
	out, err := s.server.ModelMetadata(in.Name, in.Version)
	if err != nil {
		return nil, failed(err)
	}
	return out, nil
}

func (s *service) ModelConfig(_ context.Context, in *inferencepb.ModelConfigRequest) (*inferencepb.ModelConfigResponse, error) {
	config, err := s.server.ModelConfig(in.Name, in.Version)
	if err != nil {
		return nil, failed(err)
	}
	return &inferencepb.ModelConfigResponse{Config: config}, nil
}

func (s *service) ModelStatistics(_ context.Context, in *inferencepb.ModelStatisticsRequest) (*inferencepb.ModelStatisticsResponse, error) {
	out, err := s.server.Statistics(in.Name, in.Version)
	if err != nil {
		return nil, failed(err)
	}
	return out, nil
}

func (s *service) RepositoryIndex(_ context.Context, in *inferencepb.RepositoryIndexRequest) (*inferencepb.RepositoryIndexResponse, error) {
	out, err := s.server.Index(in.RepositoryName, in.Ready)
	if err != nil {
		return nil, failed(err)
	}
	return out, nil
}

func (s *service) RepositoryModelLoad(_ context.Context, in *inferencepb.RepositoryModelLoadRequest) (*inferencepb.RepositoryModelLoadResponse, error) {
	// A load that has begun is carried through: the client's leaving must not stop it half-way.
	if err := s.server.Load(context.Background(), in.RepositoryName, in.ModelName, len(in.Parameters)); err != nil {
		return nil, failed(err)
	}
	return &inferencepb.RepositoryModelLoadResponse{}, nil
}

func (s *service) RepositoryModelUnload(_ context.Context, in *inferencepb.RepositoryModelUnloadRequest) (*inferencepb.RepositoryModelUnloadResponse, error) {
	if err := s.server.Unload(in.RepositoryName, in.ModelName); err != nil {
		return nil, failed(err)
	}
	return &inferencepb.RepositoryModelUnloadResponse{}, nil
}

func (s *service) SystemSharedMemoryStatus(_ context.Context, in *inferencepb.SystemSharedMemoryStatusRequest) (*inferencepb.SystemSharedMemoryStatusResponse, error) {
	regions, err := s.server.Regions.Status(in.Name)
	if err != nil {
		return nil, failed(err)
	}
	out := &inferencepb.SystemSharedMemoryStatusResponse{Regions: map[string]*inferencepb.SystemSharedMemoryStatusResponse_RegionStatus{}}
	for _, r := range regions {
		out.Regions[r.Name] = &inferencepb.SystemSharedMemoryStatusResponse_RegionStatus{Name: r.Name, Key: r.Key, Offset: r.Offset, ByteSize: r.ByteSize}
	}
	return out, nil
}

func (s *service) SystemSharedMemoryRegister(_ context.Context, in *inferencepb.SystemSharedMemoryRegisterRequest) (*inferencepb.SystemSharedMemoryRegisterResponse, error) {
	if err := s.server.Regions.Register(in.Name, in.Key, in.Offset, in.ByteSize); err != nil {
		return nil, failed(err)
	}
	return &inferencepb.SystemSharedMemoryRegisterResponse{}, nil
}

func (s *service) SystemSharedMemoryUnregister(_ context.Context, in *inferencepb.SystemSharedMemoryUnregisterRequest) (*inferencepb.SystemSharedMemoryUnregisterResponse, error) {
	s.server.Regions.Unregister(in.Name)
	return &inferencepb.SystemSharedMemoryUnregisterResponse{}, nil
}

func (s *service) CudaSharedMemoryStatus(_ context.Context, in *inferencepb.CudaSharedMemoryStatusRequest) (*inferencepb.CudaSharedMemoryStatusResponse, error) {
	if in.Name != "" {
		return nil, failed(endpoint.NoCUDARegion(in.Name))
	}
	return &inferencepb.CudaSharedMemoryStatusResponse{}, nil
}

func (s *service) CudaSharedMemoryRegister(_ context.Context, in *inferencepb.CudaSharedMemoryRegisterRequest) (*inferencepb.CudaSharedMemoryRegisterResponse, error) {
	return nil, failed(endpoint.NoCUDA(in.Name))
}

func (s *service) CudaSharedMemoryUnregister(context.Context, *inferencepb.CudaSharedMemoryUnregisterRequest) (*inferencepb.CudaSharedMemoryUnregisterResponse, error) {
	return &inferencepb.CudaSharedMemoryUnregisterResponse{}, nil
}

func notYet(what string) error {
	return failed(errcode.Errorf(errcode.Unsupported, "%s is not supported yet", what))
}

func (s *service) ModelStreamInfer(grpc.BidiStreamingServer[inferencepb.ModelInferRequest, inferencepb.ModelStreamInferResponse]) error {
	return notYet("ModelStreamInfer")
}

func (s *service) TraceSetting(context.Context, *inferencepb.TraceSettingRequest) (*inferencepb.TraceSettingResponse, error) {
	return nil, notYet("the trace extension")
}

func (s *service) LogSettings(context.Context, *inferencepb.LogSettingsRequest) (*inferencepb.LogSettingsResponse, error) {
	return nil, notYet("the logging extension")
}

// health is grpc.health.v1 for the server as a whole.
type health struct {
	healthpb.UnimplementedHealthServer
	server *endpoint.Server
}

func (h *health) Check(_ context.Context, in *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if in.Service != "" && in.Service != inferencepb.GRPCInferenceService_ServiceDesc.ServiceName {
		return nil, status.Error(codes.NotFound, "unknown service")
	}
	if h.server.Ready() {
		return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
	}
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_NOT_SERVING}, nil
}
