// Package fdpass sends small messages with descriptors between host and stub, over a
// SOCK_SEQPACKET pair: one message, one packet, so there is nothing to frame.
package fdpass

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Kind says what a message is.
type Kind uint32

const (
	// KindInstance carries the data channel of instance Index, host to stub.
	KindInstance Kind = 1
	// KindExited says that the process of instance Index ended with Status, a wait status;
	// stub to host.
	KindExited Kind = 2
)

// Message is 12 bytes on the wire, little-endian: kind, index, status.
type Message struct {
	Kind   Kind
	Index  uint32
	Status uint32
}

const byteSize = 12

// Pair makes a connected pair; theirs goes to the stub as an inherited descriptor.
func Pair() (ours *Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "descriptor socket")
	ours, err = New(os.NewFile(uintptr(fds[0]), "descriptor socket"))
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// Conn is one end. Send and Receive may be called from one goroutine each.
type Conn struct{ conn *net.UnixConn }

// New takes the socket over. It refuses one whose peer is another user's process.
func New(file *os.File) (*Conn, error) {
	defer file.Close()
	peer, err := unix.GetsockoptUcred(int(file.Fd()), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, fmt.Errorf("descriptor socket: %w", err)
	}
	if int(peer.Uid) != os.Getuid() {
		return nil, fmt.Errorf("descriptor socket: peer is user %d, not %d", peer.Uid, os.Getuid())
	}
	c, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("descriptor socket: %w", err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("descriptor socket: not a Unix socket")
	}
	return &Conn{conn}, nil
}

// Send sends m, with a descriptor unless file is nil. The file stays the caller's.
func (c *Conn) Send(m Message, file *os.File) error {
	var b [byteSize]byte
	binary.LittleEndian.PutUint32(b[0:], uint32(m.Kind))
	binary.LittleEndian.PutUint32(b[4:], m.Index)
	binary.LittleEndian.PutUint32(b[8:], m.Status)
	var oob []byte
	if file != nil {
		oob = unix.UnixRights(int(file.Fd()))
	}
	if _, _, err := c.conn.WriteMsgUnix(b[:], oob, nil); err != nil {
		return fmt.Errorf("descriptor socket: %w", err)
	}
	return nil
}

// Receive waits for a message; the file is nil where none came with it. io.EOF: the peer ended.
func (c *Conn) Receive() (Message, *os.File, error) {
	var b [byteSize]byte
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := c.conn.ReadMsgUnix(b[:], oob)
	if n == 0 && err == nil {
		err = io.EOF
	}
	if err != nil {
		return Message{}, nil, err
	}
	var file *os.File
	if oobn > 0 {
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err == nil && len(messages) > 0 {
			if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) > 0 {
				unix.CloseOnExec(fds[0])
				file = os.NewFile(uintptr(fds[0]), "data channel")
			}
		}
	}
	if n != byteSize {
		if file != nil {
			file.Close()
		}
		return Message{}, nil, fmt.Errorf("descriptor socket: message of %d bytes", n)
	}
	return Message{Kind(binary.LittleEndian.Uint32(b[0:])), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])}, file, nil
}

// Close ends the connection; a blocked Receive returns an error.
func (c *Conn) Close() error { return c.conn.Close() }
