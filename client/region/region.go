// Package region makes a client's side of shared memory: a POSIX shared-memory object that a
// server on the same machine can be given instead of bytes.
package region

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"

	"github.com/nereid-serve/nereid/internal/shm"
)

// folder is where POSIX shared-memory objects are files.
const folder = "/dev/shm"

// Region is a shared-memory object with a name for servers. Close ends it.
type Region struct {
	name, path string
	mapping    *shm.Mapping
	byteSize   uint64
}

// New makes an object of byteSize bytes, all zero, readable by this user alone.
func New(name string, byteSize uint64) (*Region, error) {
	path := filepath.Join(folder, fmt.Sprintf("nereid-client-%d-%s", os.Getpid(), rand.Text()))
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("region '%s': %w", name, err)
	}
	if err := file.Truncate(int64(byteSize)); err != nil {
		file.Close()
		os.Remove(path)
		return nil, fmt.Errorf("region '%s' of %d bytes: %w", name, byteSize, err)
	}
	mapping, err := shm.MapClient(file, byteSize)
	if err != nil {
		os.Remove(path)
		return nil, fmt.Errorf("region '%s': %w", name, err)
	}
	return &Region{name, path, mapping, byteSize}, nil
}

// Name is what requests call it.
func (r *Region) Name() string { return r.name }

// Key is the object's name, as given to shm_open.
func (r *Region) Key() string { return "/" + filepath.Base(r.path) }

// ByteSize is its size in bytes.
func (r *Region) ByteSize() uint64 { return r.byteSize }

// Data is its memory, valid until Close. A server reads and writes it during a request.
func (r *Region) Data() []byte { return r.mapping.Data() }

// Close unmaps the memory and removes the object. Unregister it from servers first.
func (r *Region) Close() error {
	err := r.mapping.Close()
	if removeErr := os.Remove(r.path); err == nil {
		err = removeErr
	}
	return err
}
