// Package supervisor runs one stub process: finds its program, starts it, shakes hands,
// watches it, and ends it. Its caller decides whether to start another.
package supervisor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nereid-serve/nereid/internal/fdpass"
	"github.com/nereid-serve/nereid/internal/handshake"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
)

// BinaryPrefix begins the file name of every backend in Go.
const BinaryPrefix = "nereid-backend-"

// FindBinary looks for the program of a backend in folders, in order. The name is one that
// modelconfig.Validate has let pass.
func FindBinary(backend string, folders []string) (string, error) {
	for _, f := range folders {
		path := filepath.Join(f, BinaryPrefix+backend)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("unable to find backend '%s': no executable %s%s in %s", backend, BinaryPrefix, backend, strings.Join(folders, ", "))
}

// Spec says what to start.
type Spec struct {
	Path string
	Args []string // after the program's name; they name model and version for who reads ps
	Env  []string // in addition to the variables that every stub is handed on
	// Files are inherited from descriptor 4 on; Start closes them.
	Files  []*os.File
	Logger *slog.Logger
	// StartTimeout bounds the time to the handshake.
	StartTimeout time.Duration
}

// Stub is a running stub process.
type Stub struct {
	Control backendpb.BackendClient

	client  *plugin.Client
	process *process
	fds     *fdpass.Conn
	logs    *logWriter

	mu   sync.Mutex
	exit string // what InstanceExited said
}

// passedOn are the variables of the host's environment that a stub is given; a name with *
// at its end stands for all that begin so.
var passedOn = []string{
	"PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHON*", "OMP_*",
	"OPENBLAS_*", "MKL_*", "NUMEXPR_*", "CUDA_*", "NVIDIA_*", "HF_*", "TRANSFORMERS_*", "TORCH_*", "TRITON_*",
	"SSL_CERT_*", "GOMAXPROCS", "GOMEMLIMIT", "GOGC", "GOTRACEBACK",
}

// Environment is the part of the host's environment that stubs are handed on.
func Environment() []string {
	var out []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		for _, p := range passedOn {
			if prefix, ok := strings.CutSuffix(p, "*"); ok && strings.HasPrefix(name, prefix) || name == p {
				out = append(out, e)
				break
			}
		}
	}
	return out
}

// Start starts a stub and shakes hands with it. ctx bounds the start, not the stub's life.
func Start(ctx context.Context, spec Spec) (*Stub, error) {
	defer func() {
		for _, f := range spec.Files {
			f.Close()
		}
	}()
	ours, theirs, err := fdpass.Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	s := &Stub{fds: ours, logs: newLogWriter(spec.Logger)}
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Env = append(Environment(), spec.Env...)
	cmd.ExtraFiles = append([]*os.File{theirs}, spec.Files...)
	// A group of its own: Ctrl-C at a terminal is for the host, which drains before it ends stubs.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	s.client = plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig: plugin.HandshakeConfig{
			ProtocolVersion: handshake.ProtocolVersion, MagicCookieKey: handshake.CookieKey, MagicCookieValue: handshake.CookieValue,
		},
		Plugins:          plugin.PluginSet{handshake.PluginName: &control{}},
		Cmd:              nil,
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		SkipHostEnv:      true,
		StartTimeout:     spec.StartTimeout,
		Stderr:           s.logs,
		SyncStdout:       s.logs,
		SyncStderr:       s.logs,
		Logger:           hclog.NewNullLogger(),
		RunnerFunc: func(_ hclog.Logger, template *exec.Cmd, folder string) (runner.Runner, error) {
			cmd.Env = append(cmd.Env, template.Env...)
			p, err := newProcess(cmd, folder)
			s.process = p
			return p, err
		},
	})
	started := make(chan error, 1)
	var raw any
	go func() {
		protocol, err := s.client.Client()
		if err == nil {
			raw, err = protocol.Dispense(handshake.PluginName)
		}
		started <- err
	}()
	select {
	case err = <-started:
	case <-ctx.Done():
		s.client.Kill()
		<-started
		err = ctx.Err()
	}
	if err != nil {
		s.Kill()
		if s.process != nil && s.process.state() != "" {
			err = fmt.Errorf("stub ended before it was ready: %s; is %s a Nereid backend of protocol version %d?", s.process.state(), spec.Path, handshake.ProtocolVersion)
		}
		return nil, err
	}
	s.Control = raw.(backendpb.BackendClient)
	go s.receive()
	return s, nil
}

// receive hears which instance's process ended.
func (s *Stub) receive() {
	for {
		m, file, err := s.fds.Receive()
		if file != nil {
			file.Close()
		}
		if err != nil {
			return
		}
		if m.Kind == fdpass.KindExited {
			s.mu.Lock()
			if s.exit == "" {
				s.exit = describe(syscall.WaitStatus(m.Status))
			}
			s.mu.Unlock()
			// A stub with an instance missing is of no use: its end is the one way to restart.
			s.process.kill()
		}
	}
}

// SendChannel gives the stub its end of the data channel of the next instance.
func (s *Stub) SendChannel(index int, file *os.File) error {
	return s.fds.Send(fdpass.Message{Kind: fdpass.KindInstance, Index: uint32(index)}, file)
}

// HideSocket removes the control socket's name. The connection stays; nobody else can make
// one, and nothing is left behind when both processes are killed.
func (s *Stub) HideSocket() {
	os.RemoveAll(s.process.folder)
}

// Exited is closed when the process has ended.
func (s *Stub) Exited() <-chan struct{} { return s.process.exited }

// ExitReason says how the process, or that of one of its instances, ended:
// "killed by signal 9 (killed)", "exit status 1".
func (s *Stub) ExitReason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != "" {
		return s.exit
	}
	return s.process.state()
}

// Condemn is Kill with a reason, which ExitReason gives unless one is known already.
func (s *Stub) Condemn(reason string) {
	s.mu.Lock()
	if s.exit == "" && s.process.state() == "" {
		s.exit = reason
	}
	s.mu.Unlock()
	s.Kill()
}

// Kill ends the process at once and waits for its end.
func (s *Stub) Kill() {
	if s.process != nil {
		s.process.kill()
	}
	s.client.Kill()
	if s.process != nil {
		s.process.closePipes()
	}
	s.fds.Close()
	s.logs.Close()
}

// describe words a wait status.
func describe(w syscall.WaitStatus) string {
	if w.Signaled() {
		return fmt.Sprintf("killed by signal %d (%s)", int(w.Signal()), w.Signal())
	}
	return fmt.Sprintf("exit status %d", w.ExitStatus())
}

// Message is the text of an error from the control channel.
func Message(err error) string {
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}

// Broken tells whether an error is that of a connection which ended, not of the stub's own.
func Broken(err error) bool { return status.Code(err) == codes.Unavailable }

type control struct{ plugin.NetRPCUnsupportedPlugin }

func (control) GRPCServer(*plugin.GRPCBroker, *grpc.Server) error {
	return errors.New("the host serves no backend")
}

func (control) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return backendpb.NewBackendClient(conn), nil
}

// process is go-plugin's view of the stub: ours, so that we are first to know how it ended.
type process struct {
	cmd            *exec.Cmd
	folder         string // of the control socket
	stdout, stderr io.ReadCloser
	exited         chan struct{}
	once           sync.Once
	reason         string
}

func newProcess(cmd *exec.Cmd, folder string) (*process, error) {
	p := &process{cmd: cmd, folder: folder, exited: make(chan struct{})}
	var err error
	if p.stdout, err = cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	p.stderr, err = cmd.StderrPipe()
	return p, err
}

func (p *process) Start(context.Context) error {
	if err := p.cmd.Start(); err != nil {
		p.once.Do(func() { p.reason = err.Error(); close(p.exited) })
		return err
	}
	go func() {
		// Process.Wait, not Cmd.Wait: that would close the pipes before go-plugin has read them.
		state, err := p.cmd.Process.Wait()
		p.once.Do(func() {
			if err != nil {
				p.reason = err.Error()
			} else {
				p.reason = describe(state.Sys().(syscall.WaitStatus))
			}
			close(p.exited)
		})
	}()
	return nil
}

func (p *process) Wait(context.Context) error {
	<-p.exited
	return nil
}

func (p *process) Kill(context.Context) error {
	p.kill()
	return nil
}

func (p *process) kill() {
	if p.cmd.Process != nil {
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

// state is the reason of the end, "" before it.
func (p *process) state() string {
	select {
	case <-p.exited:
		return p.reason
	default:
		return ""
	}
}

func (p *process) Stdout() io.ReadCloser { return p.stdout }
func (p *process) Stderr() io.ReadCloser { return p.stderr }
func (p *process) Name() string          { return p.cmd.Path }
func (p *process) ID() string {
	if p.cmd.Process == nil {
		return ""
	}
	return fmt.Sprint(p.cmd.Process.Pid)
}
func (p *process) Diagnose(context.Context) string { return "" }

// PluginToHost refuses any address but a socket in the folder made for this stub.
func (p *process) PluginToHost(network, address string) (string, string, error) {
	if network != "unix" || filepath.Dir(filepath.Clean(address)) != p.folder {
		return "", "", fmt.Errorf("stub listens on %s %q, not in its socket folder", network, address)
	}
	return network, address, nil
}

func (p *process) HostToPlugin(network, address string) (string, string, error) {
	return network, address, nil
}

// closePipes ends what go-plugin read from; the process has ended.
func (p *process) closePipes() {
	p.stdout.Close()
	p.stderr.Close()
}

// logWriter turns lines of a stub into log records; "<4>text" carries a level, as in sd-daemon(3).
type logWriter struct {
	pipe *io.PipeWriter
}

func newLogWriter(logger *slog.Logger) *logWriter {
	r, w := io.Pipe()
	go func() {
		lines := bufio.NewReaderSize(r, 64<<10)
		for {
			line, err := lines.ReadString('\n')
			if line = strings.TrimRight(line, "\r\n"); line != "" {
				level := slog.LevelInfo
				if len(line) >= 3 && line[0] == '<' && line[2] == '>' {
					switch line[1] {
					case '3':
						level = slog.LevelError
					case '4':
						level = slog.LevelWarn
					case '7':
						level = slog.LevelDebug
					}
					line = line[3:]
				}
				logger.Log(context.Background(), level, line)
			}
			if err != nil {
				return
			}
		}
	}()
	return &logWriter{w}
}

func (l *logWriter) Write(b []byte) (int, error) {
	if n, err := l.pipe.Write(b); err == nil {
		return n, nil
	}
	return len(b), nil // closed: what a dying stub still says is not worth an error
}

func (l *logWriter) Close() { l.pipe.Close() }
