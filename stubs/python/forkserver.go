// Package python runs unmodified Triton model.py files.
//
// Three processes take part, all started from this program's own binary and embedded files:
// the stub, a small Go program that speaks go-plugin to the host (Main); one fork server for
// each Python environment, which imports numpy once (ForkServers, used by the host); and one
// interpreter for each instance, forked from it, which talks to the host directly over its
// data channel. The interpreter's code is pure Python below worker/, embedded.
package python

import (
	"archive/zip"
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

//go:embed all:worker
var worker embed.FS

// Interpreter finds the Python to run a model with. env is its EXECUTION_ENV_PATH: a virtual
// environment's folder, or an interpreter; "" means python3. Errors name what is missing.
func Interpreter(env, modelDirectory string) (string, error) {
	if env == "" {
		path, err := exec.LookPath("python3")
		if err != nil {
			return "", fmt.Errorf("python3 is not on the PATH; install Python 3.9 or newer with numpy, or set the parameter EXECUTION_ENV_PATH")
		}
		return path, nil
	}
	path := strings.ReplaceAll(env, "$$TRITON_MODEL_DIRECTORY", modelDirectory)
	if !filepath.IsAbs(path) {
		path = filepath.Join(modelDirectory, path)
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("EXECUTION_ENV_PATH %s: %w", env, errors.Unwrap(err))
	}
	if info.IsDir() {
		path = filepath.Join(path, "bin", "python3")
		if info, err = os.Stat(path); err != nil {
			return "", fmt.Errorf("EXECUTION_ENV_PATH %s is no virtual environment: it has no bin/python3", env)
		}
	}
	if info.Mode()&0o111 == 0 {
		return "", fmt.Errorf("EXECUTION_ENV_PATH %s is neither a virtual environment nor an interpreter; packed environments are not supported yet: unpack it and name its folder", env)
	}
	return path, nil
}

// archive is the worker's code as a zip file in a sealed memfd: Python runs it from there, and
// no temporary file is left by whoever is killed.
func archive() (*os.File, error) {
	var buf bytes.Buffer
	w := zip.NewWriter(&buf)
	err := fs.WalkDir(worker, "worker", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".py") {
			return err
		}
		text, err := worker.ReadFile(path)
		if err != nil {
			return err
		}
		f, err := w.CreateHeader(&zip.FileHeader{Name: strings.TrimPrefix(path, "worker/"), Method: zip.Store})
		if err == nil {
			_, err = f.Write(text)
		}
		return err
	})
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, err
	}
	return memfd("nereid python worker", buf.Bytes())
}

func memfd(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err = f.WriteAt(content, 0); err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// titleSpace is room on a fork server's command line: an interpreter writes the name of its
// model there, for who reads ps.
const titleSpace = 256

// ForkServers has the fork server of each Python environment. Its methods may be called from
// any goroutine.
type ForkServers struct {
	logger *slog.Logger
	env    []string

	mu      sync.Mutex
	servers map[string]*forkServer
	closed  bool
}

type forkServer struct {
	cmd     *exec.Cmd
	control *os.File
	ended   chan struct{}
}

// NewForkServers starts nothing yet. env is the environment of every interpreter.
func NewForkServers(logger *slog.Logger, env []string) *ForkServers {
	return &ForkServers{logger: logger, env: env, servers: map[string]*forkServer{}}
}

// Connect returns a connection to the fork server of an interpreter's environment, which it
// starts if there is none. The interpreters forked over a connection end with it.
func (s *ForkServers) Connect(interpreter string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("server is shutting down")
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(fds[1])
	ours := os.NewFile(uintptr(fds[0]), "fork server")
	for range 2 { // a server that has died is replaced once
		f := s.servers[interpreter]
		if f == nil {
			if f, err = s.start(interpreter); err != nil {
				break
			}
			s.servers[interpreter] = f
		}
		if err = unix.Sendmsg(int(f.control.Fd()), []byte("C"), unix.UnixRights(fds[1]), nil, unix.MSG_NOSIGNAL); err == nil {
			return ours, nil
		}
		f.end()
		delete(s.servers, interpreter)
	}
	ours.Close()
	return nil, fmt.Errorf("start %s: %w", interpreter, err)
}

func (s *ForkServers) start(interpreter string) (*forkServer, error) {
	code, err := archive()
	if err != nil {
		return nil, err
	}
	defer code.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "fork server control")
	defer theirs.Close()
	cmd := exec.Command(interpreter, "/proc/self/fd/4", strings.Repeat("-", titleSpace))
	cmd.Env = append(s.env, "PYTHONUNBUFFERED=1")
	cmd.ExtraFiles = []*os.File{theirs, code}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		unix.Close(fds[0])
		return nil, err
	}
	f := &forkServer{cmd: cmd, control: os.NewFile(uintptr(fds[0]), "fork server control"), ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(f.ended)
	}()
	return f, nil
}

// end closes the control socket, on which the server ends its interpreters and itself.
func (f *forkServer) end() {
	f.control.Close()
	<-f.ended
}

// Close ends every fork server and the interpreters that are left.
func (s *ForkServers) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, f := range s.servers {
		f.end()
	}
	s.servers = nil
}
