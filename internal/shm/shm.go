// Package shm makes, seals and maps the memory that host and stubs share. It is the only
// place that maps memory.
//
// A segment is a memfd without a name: it travels by descriptor, so nobody can open it by
// guessing, and nothing is left when its last holder ends.
package shm

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Seals by who writes. Both keep the size: a mapping of a sealed segment cannot fault.
const (
	// InputSeals also forbid future writable mappings: the host has its own from before,
	// the stub can have none.
	InputSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
	// OutputSeals let the stub write and the host read.
	OutputSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
)

// ErrNotSealed says that a segment from another process could change its size under us.
var ErrNotSealed = errors.New("segment is not sealed against shrinking")

var open atomic.Int64

// Open is the number of mappings that are not closed, for leak checks.
func Open() int64 { return open.Load() }

// Mapping is mapped memory with the descriptor it came from. Close ends both.
type Mapping struct {
	file *os.File
	data []byte
}

// Create makes a segment of byteSize bytes, mapped for reading and writing, then sealed.
// The name shows in /proc/PID/maps only.
func Create(name string, byteSize uint64, seals int) (*Mapping, error) {
	if byteSize == 0 || byteSize > 1<<46 {
		return nil, fmt.Errorf("segment of %d bytes: size out of range", byteSize)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	file := os.NewFile(uintptr(fd), name)
	if err := unix.Ftruncate(fd, int64(byteSize)); err != nil {
		file.Close()
		return nil, fmt.Errorf("segment of %d bytes: %w", byteSize, err)
	}
	m, err := mapFile(file, byteSize, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		m.Close()
		return nil, fmt.Errorf("seal segment: %w", err)
	}
	return m, nil
}

// Import maps a segment received from another process. It takes the file over, also on
// error. The segment must be sealed against shrinking and hold byteSize bytes, so that no
// read of the mapping can fault.
func Import(file *os.File, byteSize uint64, writable bool) (*Mapping, error) {
	seals, err := unix.FcntlInt(file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		file.Close()
		return nil, ErrNotSealed
	}
	if size, err := FileByteSize(file); err != nil || byteSize == 0 || byteSize > size {
		file.Close()
		return nil, fmt.Errorf("segment holds %d bytes, announced %d", size, byteSize)
	}
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	return mapFile(file, byteSize, prot)
}

// MapClient maps byteSize bytes of a client's shared-memory object, which may shrink at any
// time: only a stub does this, never the host. It takes the file over, also on error.
func MapClient(file *os.File, byteSize uint64) (*Mapping, error) {
	return mapFile(file, byteSize, unix.PROT_READ|unix.PROT_WRITE)
}

func mapFile(file *os.File, byteSize uint64, prot int) (*Mapping, error) {
	data, err := unix.Mmap(int(file.Fd()), 0, int(byteSize), prot, unix.MAP_SHARED)
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("map %d bytes: %w", byteSize, err)
	}
	open.Add(1)
	return &Mapping{file: file, data: data}, nil
}

// Data is the mapped memory, valid until Close.
func (m *Mapping) Data() []byte { return m.data }

// FD is the descriptor to send; it stays the mapping's.
func (m *Mapping) FD() int { return int(m.file.Fd()) }

// Punch gives the pages of a range back to the system; they read as zero afterwards.
// A failure only means that the memory stays, so there is none to report.
func (m *Mapping) Punch(offset, byteSize uint64) {
	_ = unix.Fallocate(m.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(offset), int64(byteSize))
}

// Close unmaps the memory and closes the descriptor. Only the first call does anything.
func (m *Mapping) Close() error {
	if m.data == nil {
		return nil
	}
	err := unix.Munmap(m.data)
	m.data = nil
	open.Add(-1)
	return errors.Join(err, m.file.Close())
}

// FileByteSize is the size of the object behind a descriptor now.
func FileByteSize(file *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return 0, err
	}
	return uint64(st.Size), nil
}
