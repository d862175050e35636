package python

import "golang.org/x/sys/unix"

// NewStub makes a stub on a connection to a fork server, for the tests beside; orphaned is
// called when the connection ends.
func NewStub(server int, orphaned func(error)) *stub {
	return &stub{server: server, exited: map[int]chan struct{}{}, early: map[int]unix.WaitStatus{}, orphaned: orphaned}
}
