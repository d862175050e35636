// Package channel moves frames over one Unix stream socket: the data channel of an instance.
//
// A writer that finds another at work leaves its frames with that one, so what piles up
// goes out in one call. Descriptors travel with the frame that announces them, which keeps
// both in one order. The end of the stream is the sign that the peer is gone.
package channel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nereid-serve/nereid/internal/wire"
)

// Pair makes a connected pair of sockets: one for each side.
func Pair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "data channel"), os.NewFile(uintptr(fds[1]), "data channel"), nil
}

// Conn is one side of a data channel. Send may be called from any goroutine, Next from one.
type Conn struct {
	conn *net.UnixConn
	raw  syscall.RawConn

	mu      sync.Mutex
	writing bool
	pending []item
	spare   []byte
	failed  error

	buf        []byte
	start, end int
	oob        []byte
	fds        []int

	// The arguments and results of read, which is made once: a closure made for each call
	// would be garbage on the hot path.
	read      func(fd uintptr) bool
	readN     int
	readOOB   int
	readErr   error
	write     func(fd uintptr) bool
	writeData []byte
	writeFD   int
	writeN    int
	writeErr  error
}

type item struct {
	data []byte
	fd   int // -1: none; closed once sent
}

// New takes the socket over.
func New(file *os.File) (*Conn, error) {
	c, err := net.FileConn(file)
	file.Close()
	if err != nil {
		return nil, fmt.Errorf("data channel: %w", err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("data channel: not a Unix socket")
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("data channel: %w", err)
	}
	s := &Conn{conn: conn, raw: raw, buf: make([]byte, 16<<10), oob: make([]byte, unix.CmsgSpace(4*4))}
	s.read = func(fd uintptr) bool {
		s.readN, s.readOOB, _, _, s.readErr = unix.Recvmsg(int(fd), s.buf[s.end:], s.oob, unix.MSG_CMSG_CLOEXEC)
		return s.readErr != unix.EAGAIN && s.readErr != unix.EINTR
	}
	s.write = func(fd uintptr) bool {
		if s.writeFD >= 0 {
			s.writeN, s.writeErr = unix.SendmsgN(int(fd), s.writeData, unix.UnixRights(s.writeFD), nil, unix.MSG_NOSIGNAL)
		} else {
			s.writeN, s.writeErr = unix.SendmsgN(int(fd), s.writeData, nil, nil, unix.MSG_NOSIGNAL)
		}
		return s.writeErr != unix.EAGAIN && s.writeErr != unix.EINTR
	}
	return s, nil
}

// Send writes whole frames. It copies what it cannot write at once for another writer's
// sake, and blocks while the socket is full and no other writer is at work.
func (c *Conn) Send(frames []byte) error { return c.send(frames, -1) }

// SendFD writes one frame with a descriptor, which stays the caller's.
func (c *Conn) SendFD(frame []byte, fd int) error {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("data channel: duplicate descriptor: %w", err)
	}
	return c.send(frame, dup)
}

func (c *Conn) send(frames []byte, fd int) error {
	c.mu.Lock()
	if c.failed != nil {
		c.mu.Unlock()
		closeFD(fd)
		return c.failed
	}
	if c.writing {
		last := len(c.pending) - 1
		if fd < 0 && last >= 0 && c.pending[last].fd < 0 {
			c.pending[last].data = append(c.pending[last].data, frames...)
		} else {
			buf := c.spare
			c.spare = nil
			c.pending = append(c.pending, item{append(buf[:0], frames...), fd})
		}
		c.mu.Unlock()
		return nil
	}
	c.writing = true
	c.mu.Unlock()
	err := c.flush(item{frames, fd})
	c.mu.Lock()
	for err == nil && len(c.pending) > 0 {
		items := c.pending
		c.pending = nil
		c.mu.Unlock()
		for _, it := range items {
			if err == nil {
				err = c.flush(it)
			} else {
				closeFD(it.fd)
			}
		}
		c.mu.Lock()
		c.spare = items[len(items)-1].data
	}
	if err != nil {
		c.failed = err
		for _, it := range c.pending {
			closeFD(it.fd)
		}
		c.pending = nil
	}
	c.writing = false
	c.mu.Unlock()
	return err
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

func (c *Conn) flush(it item) error {
	defer closeFD(it.fd)
	c.writeData, c.writeFD = it.data, it.fd
	for len(c.writeData) > 0 {
		if err := c.raw.Write(c.write); err != nil {
			return fmt.Errorf("data channel: %w", err)
		}
		if c.writeErr != nil {
			return fmt.Errorf("data channel: %w", c.writeErr)
		}
		c.writeData, c.writeFD = c.writeData[c.writeN:], -1
	}
	return nil
}

// Next returns the next frame, which is valid until the call after. The error is io.EOF
// when the peer has ended, and another one for a stream that is no sequence of frames.
func (c *Conn) Next() ([]byte, error) {
	for {
		if have := c.end - c.start; have >= wire.HeaderByteSize {
			size := binary.LittleEndian.Uint32(c.buf[c.start:])
			if size < wire.HeaderByteSize || size > wire.MaxFrameByteSize {
				return nil, fmt.Errorf("data channel: frame of %d bytes", size)
			}
			if have >= int(size) {
				frame := c.buf[c.start : c.start+int(size) : c.start+int(size)]
				c.start += int(size)
				return frame, nil
			}
			c.makeRoom(int(size))
		} else {
			c.makeRoom(wire.HeaderByteSize)
		}
		if err := c.fill(); err != nil {
			return nil, err
		}
	}
}

// Buffered tells whether Next has a frame without waiting.
func (c *Conn) Buffered() bool {
	have := c.end - c.start
	return have >= wire.HeaderByteSize && have >= int(binary.LittleEndian.Uint32(c.buf[c.start:]))
}

func (c *Conn) makeRoom(size int) {
	if c.start == c.end {
		c.start, c.end = 0, 0
	}
	if c.start+size <= len(c.buf) {
		return
	}
	if size > len(c.buf) {
		grown := make([]byte, size+size/2)
		copy(grown, c.buf[c.start:c.end])
		c.buf = grown
	} else {
		copy(c.buf, c.buf[c.start:c.end])
	}
	c.start, c.end = 0, c.end-c.start
}

func (c *Conn) fill() error {
	if err := c.raw.Read(c.read); err != nil {
		return err
	}
	if c.readErr != nil {
		if errors.Is(c.readErr, unix.ECONNRESET) {
			return io.EOF
		}
		return fmt.Errorf("data channel: %w", c.readErr)
	}
	if c.readOOB > 0 {
		if err := c.takeFDs(c.oob[:c.readOOB]); err != nil {
			return err
		}
	}
	if c.readN == 0 {
		return io.EOF
	}
	c.end += c.readN
	return nil
}

func (c *Conn) takeFDs(oob []byte) error {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("data channel: %w", err)
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fmt.Errorf("data channel: %w", err)
		}
		c.fds = append(c.fds, fds...)
	}
	// One descriptor belongs to one frame, and few frames fit one read.
	if len(c.fds) > 1024 {
		return errors.New("data channel: too many descriptors without a frame")
	}
	return nil
}

// TakeFile is the descriptor that came with the segment frame just returned by Next.
func (c *Conn) TakeFile() (*os.File, error) {
	if len(c.fds) == 0 {
		return nil, errors.New("data channel: segment without a descriptor")
	}
	f := os.NewFile(uintptr(c.fds[0]), "segment")
	c.fds = c.fds[1:]
	return f, nil
}

// CloseWrite tells the peer that nothing more comes; Next still returns what it sends.
func (c *Conn) CloseWrite() error { return c.conn.CloseWrite() }

// Close ends the channel in both directions; a blocked Next or Send returns an error.
func (c *Conn) Close() error {
	err := c.conn.Close()
	c.mu.Lock()
	if c.failed == nil {
		c.failed = net.ErrClosed
	}
	c.mu.Unlock()
	return err
}

// CloseFiles closes the descriptors that were received and not taken. Only the goroutine
// that calls Next may call it, after the last Next.
func (c *Conn) CloseFiles() {
	for _, fd := range c.fds {
		unix.Close(fd)
	}
	c.fds = nil
}
