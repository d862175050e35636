package python

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/nereid-serve/nereid/internal/handshake"
	"github.com/nereid-serve/nereid/internal/stubproc"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
)

// Main is the stub process of a Python model. It does not return.
func Main() {
	unix.CloseOnExec(handshake.ForkServerFD)
	stubproc.Serve(func(host *stubproc.Host) stubproc.Handler {
		orphaned := func(err error) {
			// Without a fork server, interpreters can neither be started nor be heard of.
			stubproc.Log(stubproc.LevelError, fmt.Sprintf("the fork server ended (%v)", err))
			os.Exit(1)
		}
		return &stub{host: host, server: handshake.ForkServerFD, orphaned: orphaned, exited: map[int]chan struct{}{}, early: map[int]unix.WaitStatus{}}
	})
}

// stub starts the interpreters of one model and hears of their ends.
type stub struct {
	host   *stubproc.Host
	server int // connection to the fork server

	orphaned func(error) // called when that ends

	mu      sync.Mutex
	exited  map[int]chan struct{} // by instance
	serving bool                  // loaded, and not being unloaded
	early   map[int]unix.WaitStatus
}

// loadArgs is what an interpreter is told, as JSON in a memfd.
type loadArgs struct {
	Title            string            `json:"title"`
	ModelName        string            `json:"model_name"`
	ModelVersion     int64             `json:"model_version"`
	ModelDirectory   string            `json:"model_directory"`
	VersionDirectory string            `json:"version_directory"`
	ModelConfig      string            `json:"model_config"`
	InstanceName     string            `json:"instance_name"`
	InstanceKind     string            `json:"instance_kind"`
	DeviceID         int32             `json:"device_id"`
	BackendConfig    map[string]string `json:"backend_config"`
	OutputLimit      uint64            `json:"output_byte_size_limit"`
	LogVerbosity     int32             `json:"log_verbosity"`
}

func (s *stub) Load(ctx context.Context, r *backendpb.LoadRequest, channels []*os.File) error {
	defer func() {
		for _, c := range channels {
			c.Close()
		}
	}()
	results := make([]*os.File, len(channels))
	for i, in := range r.GetInstances() {
		args, err := json.Marshal(loadArgs{
			Title:     fmt.Sprintf("nereid python %s/%d %s", r.GetModelName(), r.GetModelVersion(), in.GetName()),
			ModelName: r.GetModelName(), ModelVersion: r.GetModelVersion(), ModelDirectory: r.GetModelDirectory(),
			VersionDirectory: r.GetVersionDirectory(), ModelConfig: r.GetModelConfigJson(), InstanceName: in.GetName(),
			InstanceKind: in.GetKind(), DeviceID: in.GetDeviceId(), BackendConfig: r.GetBackendConfig(),
			OutputLimit: r.GetOutputByteSizeLimit(), LogVerbosity: r.GetLogVerbosity(),
		})
		if err == nil {
			results[i], err = s.spawn(i, args, channels[i])
		}
		if err != nil {
			return fmt.Errorf("instance '%s': %w", in.GetName(), err)
		}
		defer results[i].Close()
	}
	go s.receive()
	for i, in := range r.GetInstances() {
		if err := wait(ctx, results[i]); err != nil {
			return fmt.Errorf("instance '%s': %w", in.GetName(), err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serving = true
	for index, status := range s.early { // ended after it had said that all is well
		s.host.InstanceExited(index, status)
	}
	return nil
}

// spawn asks the fork server for an interpreter; what it says of its start comes from the
// returned pipe.
func (s *stub) spawn(index int, args []byte, channel *os.File) (*os.File, error) {
	input, err := memfd("nereid load arguments", args)
	if err != nil {
		return nil, err
	}
	defer input.Close()
	result, report, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer report.Close()
	s.mu.Lock()
	s.exited[index] = make(chan struct{})
	s.mu.Unlock()
	message := binary.LittleEndian.AppendUint32([]byte("S"), uint32(index))
	rights := unix.UnixRights(int(channel.Fd()), int(report.Fd()), 2, int(input.Fd()))
	if err := unix.Sendmsg(s.server, message, rights, nil, unix.MSG_NOSIGNAL); err != nil {
		result.Close()
		return nil, fmt.Errorf("fork server: %w", err)
	}
	return result, nil
}

// wait reads how an interpreter's start went.
func wait(ctx context.Context, result *os.File) error {
	stop := context.AfterFunc(ctx, func() { result.Close() })
	defer stop()
	text, err := io.ReadAll(result)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	var report struct{ Error *string }
	if json.Unmarshal(text, &report) != nil {
		return errors.New("the interpreter ended before the model was initialized")
	}
	if report.Error != nil {
		return errors.New(*report.Error)
	}
	return nil
}

// receive hears from the fork server how interpreters ended: "X", instance, wait status.
func (s *stub) receive() {
	var b [16]byte
	for {
		n, err := unix.Read(s.server, b[:])
		if err == unix.EINTR {
			continue
		}
		if n != 9 || b[0] != 'X' {
			s.orphaned(err)
			return
		}
		index := int(binary.LittleEndian.Uint32(b[1:]))
		status := unix.WaitStatus(binary.LittleEndian.Uint32(b[5:]))
		s.mu.Lock()
		if done := s.exited[index]; done != nil {
			close(done)
			delete(s.exited, index)
		}
		switch {
		case status == 0: // it was told to finalize; Unload may be on its way still
		case s.serving:
			s.host.InstanceExited(index, status)
		default: // while it loads, the report pipe says more
			s.early[index] = status
		}
		s.mu.Unlock()
	}
}

// Unload waits for the interpreters: the end of their data channels told them to finalize.
func (s *stub) Unload(ctx context.Context) error {
	s.mu.Lock()
	s.serving = false
	var waits []chan struct{}
	for _, done := range s.exited {
		waits = append(waits, done)
	}
	s.mu.Unlock()
	for _, done := range waits {
		select {
		case <-done:
		case <-ctx.Done():
			return errors.New("an instance did not finalize in time; it is ended")
		}
	}
	return nil
}
