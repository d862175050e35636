// Misbehave is a backend that does what no backend should, for tests of the host: the model
// parameter "mode" says what. It speaks the data channel itself, below the SDK.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/nereid-serve/nereid/internal/channel"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/internal/stubproc"
	"github.com/nereid-serve/nereid/internal/wire"
	backendpb "github.com/nereid-serve/nereid/proto/backend"
	"github.com/nereid-serve/nereid/tensor"
)

func main() {
	stubproc.Serve(func(*stubproc.Host) stubproc.Handler { return &stub{} })
}

type stub struct{ done sync.WaitGroup }

func (s *stub) Load(_ context.Context, r *backendpb.LoadRequest, channels []*os.File) error {
	var config struct {
		Parameters map[string]struct {
			Value string `json:"string_value"`
		}
	}
	if err := json.Unmarshal([]byte(r.GetModelConfigJson()), &config); err != nil {
		return err
	}
	mode := config.Parameters["mode"].Value
	switch mode {
	case "exit in load":
		os.Exit(3)
	case "error in load":
		return fmt.Errorf("this model does not want to")
	}
	for _, file := range channels {
		conn, err := channel.New(file)
		if err != nil {
			return err
		}
		s.done.Go(func() { serve(conn, mode) })
	}
	return nil
}

func (s *stub) Unload(context.Context) error {
	s.done.Wait()
	return nil
}

func serve(conn *channel.Conn, mode string) {
	defer conn.Close()
	segment, err := shm.Create("misbehave", 4096, shm.OutputSeals)
	if err != nil {
		panic(err)
	}
	announced := false
	for {
		frame, err := conn.Next()
		if err != nil {
			return
		}
		h := wire.ParseHeader(frame)
		if h.Kind != wire.KindRequest {
			if h.Kind == wire.KindSegment {
				if f, err := conn.TakeFile(); err == nil {
					f.Close()
				}
			}
			continue
		}
		if !announced {
			announced = true
			if mode == "unsealed segment" {
				fd, _ := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC)
				_ = unix.Ftruncate(fd, 4096)
				_ = conn.SendFD(wire.AppendSegment(nil, wire.FirstOutputSegment, wire.AccessOutput, 4096), fd)
				unix.Close(fd)
			} else {
				_ = conn.SendFD(wire.AppendSegment(nil, wire.FirstOutputSegment, wire.AccessOutput, 4096), segment.FD())
			}
		}
		out := wire.Tensor{DataType: tensor.FP32, Segment: wire.FirstOutputSegment, ByteSize: 8, Shape: tensor.Shape{1, 2}}
		response := wire.Response{ID: h.ID, Flags: wire.FlagFinal, Outputs: []wire.Tensor{out}}
		o := &response.Outputs[0]
		switch mode {
		case "offset past the end":
			o.Offset = 4090
		case "offset overflow":
			o.Offset = ^uint64(0) - 3
		case "unknown segment":
			o.Segment++
		case "byte size":
			o.ByteSize = 12
		case "negative dimension":
			o.Shape = tensor.Shape{-1, 2}
		case "unknown output":
			o.Index = 7
		case "output twice":
			response.Outputs = append(response.Outputs, out)
		case "wrong id":
			response.ID += 1000
		case "error code":
			response.Flags |= wire.FlagError
			response.Code, response.Message, response.Outputs = 250, "of no known kind", nil
		case "answer twice":
			_ = conn.Send(wire.AppendResponse(nil, &response))
		case "garbage":
			_ = conn.Send([]byte("this is no frame at all, is it"))
			continue
		case "exit":
			os.Exit(7)
		case "panic":
			panic("on purpose")
		case "segv":
			_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
			select {} // the signal is on its way
		case "hang":
			continue
		}
		_ = conn.Send(wire.AppendResponse(nil, &response))
	}
}
