// Package stubproc is what every stub process has, whatever runs in it: go-plugin's
// handshake and control service, the descriptor socket, a log, and an end when the host ends.
package stubproc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nereid-serve/nereid/internal/fdpass"
	"github.com/nereid-serve/nereid/internal/handshake"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
)

// Handler runs one model version in this process.
type Handler interface {
	// Load makes the model and its instances; channels[i] is the data channel of instance i,
	// the handler's from then on. The error's text is the model's reason.
	Load(ctx context.Context, request *backendpb.LoadRequest, channels []*os.File) error
	// Unload ends what Load made. It is called once at most, after Load returned nil.
	Unload(ctx context.Context) error
}

// stderr is the pipe to the host; go-plugin puts another file in os.Stderr's place.
var stderr = os.Stderr

// Standard output is go-plugin's: a print of the author's before the handshake line would
// break the start. So this package, which is initialized before any that imports it, moves
// the pipe away and lets descriptor 1 lead to standard error.
func init() {
	if os.Getenv(handshake.CookieKey) != handshake.CookieValue {
		return
	}
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 10)
	if err != nil {
		return
	}
	if unix.Dup3(2, 1, 0) == nil {
		os.Stdout = os.NewFile(uintptr(fd), "/dev/stdout")
	}
}

// Level is a syslog priority, as in sd-daemon(3): "<6>text" on standard error.
type Level int

const (
	LevelError   Level = 3
	LevelWarning Level = 4
	LevelInfo    Level = 6
	LevelVerbose Level = 7
)

var logMu sync.Mutex

// Log sends a line to the host's log, under the name of this stub's model.
func Log(level Level, text string) {
	logMu.Lock()
	defer logMu.Unlock()
	for line := range strings.Lines(text) {
		fmt.Fprintf(stderr, "<%d>%s\n", level, strings.TrimRight(line, "\n"))
	}
}

// Host is the stub's end of the descriptor socket.
type Host struct{ conn *fdpass.Conn }

// InstanceExited tells the host that the process of an instance ended, and how.
func (h *Host) InstanceExited(index int, status unix.WaitStatus) {
	_ = h.conn.Send(fdpass.Message{Kind: fdpass.KindExited, Index: uint32(index), Status: uint32(status)}, nil)
}

// Serve runs the stub until the host ends it. It does not return where the process was
// started by a host; started by hand it says so and ends with status 2.
func Serve(newHandler func(*Host) Handler) {
	if os.Getenv(handshake.CookieKey) != handshake.CookieValue {
		fmt.Fprintln(os.Stderr, "This program is a Nereid backend: a server starts it. Put it into the backend directory\n"+
			"and name it in a model's configuration; see `nereid serve --help`.")
		os.Exit(2)
	}
	// What runs here never needs more rights than it has now.
	_ = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	unix.CloseOnExec(handshake.DescriptorFD)
	conn, err := fdpass.New(os.NewFile(handshake.DescriptorFD, "descriptor socket"))
	if err != nil {
		Log(LevelError, err.Error())
		os.Exit(1)
	}
	s := &server{channels: make(chan *os.File, 1024)}
	s.handler = newHandler(&Host{conn})
	go s.receive(conn)
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig: plugin.HandshakeConfig{
			ProtocolVersion: handshake.ProtocolVersion, MagicCookieKey: handshake.CookieKey, MagicCookieValue: handshake.CookieValue,
		},
		Plugins:    plugin.PluginSet{handshake.PluginName: &grpcPlugin{server: s}},
		GRPCServer: plugin.DefaultGRPCServer,
		Logger:     hclog.NewNullLogger(),
	})
	os.Exit(0)
}

type grpcPlugin struct {
	plugin.NetRPCUnsupportedPlugin
	server *server
}

func (p *grpcPlugin) GRPCServer(_ *plugin.GRPCBroker, s *grpc.Server) error {
	backendpb.RegisterBackendServer(s, p.server)
	return nil
}

func (p *grpcPlugin) GRPCClient(context.Context, *plugin.GRPCBroker, *grpc.ClientConn) (any, error) {
	return nil, errors.New("a stub has no client")
}

type server struct {
	backendpb.UnimplementedBackendServer
	handler  Handler
	channels chan *os.File

	mu     sync.Mutex
	loaded bool
}

// receive takes data channels until the host closes its end: then nobody needs this
// process, and its socket's folder would stay behind if it did not remove it.
func (s *server) receive(conn *fdpass.Conn) {
	for {
		m, file, err := conn.Receive()
		if err != nil {
			if dir := os.Getenv(handshake.SocketDirectoryKey); dir != "" {
				os.RemoveAll(dir)
			}
			os.Exit(0)
		}
		switch {
		case file == nil:
		case m.Kind == fdpass.KindInstance && len(s.channels) < cap(s.channels):
			s.channels <- file
		default:
			file.Close()
		}
	}
}

func (s *server) Load(ctx context.Context, request *backendpb.LoadRequest) (*backendpb.LoadResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded {
		return nil, status.Error(codes.FailedPrecondition, "this stub has its model already")
	}
	channels := make([]*os.File, len(request.GetInstances()))
	for i := range channels {
		select {
		case channels[i] = <-s.channels:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	if err := s.handler.Load(ctx, request, channels); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	s.loaded = true
	return &backendpb.LoadResponse{}, nil
}

func (s *server) Unload(ctx context.Context, _ *backendpb.UnloadRequest) (*backendpb.UnloadResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded {
		s.loaded = false
		if err := s.handler.Unload(ctx); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	return &backendpb.UnloadResponse{}, nil
}
