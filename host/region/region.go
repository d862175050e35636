// Package region keeps the shared memory that clients register: names, bounds, references.
//
// The host never maps a client's memory: the client may truncate it at any time, and a fault
// would end the host. It keeps the descriptor, asks for the object's size at each use, and
// hands the descriptor to the stub that needs it.
package region

import (
	"os"
	"sort"
	"strings"
	"sync"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/internal/shm"
	"github.com/nereid-serve/nereid/tensor"
)

// Folder is where POSIX shared-memory objects are files.
const Folder = "/dev/shm"

// maxNumber keeps regions' segment numbers apart from those of input arenas.
const maxNumber = 1<<30 - 1

// Info describes a registered region.
type Info struct {
	Name     string
	Key      string
	Offset   uint64
	ByteSize uint64
}

// Region is one registered region. It lives until it is unregistered and nobody uses it.
type Region struct {
	Info
	Number uint32 // its segment number towards stubs

	registry *Registry
	file     *os.File
	uses     int
	gone     bool
}

// Registry has the regions of one server. Its methods may be called from any goroutine.
type Registry struct {
	// Forget is called, without a lock held, after a region ended: stubs may unmap it.
	Forget func(number uint32)

	mu      sync.Mutex
	regions map[string]*Region
	next    uint32
}

// New makes an empty registry.
func New() *Registry { return &Registry{regions: map[string]*Region{}, next: 1} }

// Register opens the object and gives byteSize bytes from offset on a name.
// Errors: AlreadyExists for a name in use; Internal for an object that can't be opened;
// InvalidArg for a key that is no object's name and for bounds that pass the object's end.
// Source: Triton's system shared-memory extension.
func (r *Registry) Register(name, key string, offset, byteSize uint64) error {
	if name == "" {
		return errcode.Errorf(errcode.InvalidArg, "failed to register shared memory region: the name is empty")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if old := r.regions[name]; old != nil {
		return errcode.Errorf(errcode.AlreadyExists, "shared memory region '%s' already in manager", name)
	}
	file, err := open(key)
	if err != nil {
		return err
	}
	size, err := shm.FileByteSize(file)
	if err == nil {
		if _, ok := tensor.End(offset, byteSize, size); !ok || byteSize == 0 {
			err = errcode.Errorf(errcode.InvalidArg, "failed to register shared memory region '%s': %d bytes at offset %d do not fit the object '%s' of %d bytes", name, byteSize, offset, key, size)
		}
	}
	if err == nil && r.next > maxNumber {
		err = errcode.Errorf(errcode.Unavailable, "failed to register shared memory region '%s': too many registrations since the start", name)
	}
	if err != nil {
		file.Close()
		return err
	}
	r.regions[name] = &Region{Info: Info{name, key, offset, byteSize}, Number: r.next, registry: r, file: file}
	r.next++
	return nil
}

func open(key string) (*os.File, error) {
	name := strings.TrimPrefix(key, "/")
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || len(name) > 255 {
		return nil, errcode.Errorf(errcode.InvalidArg, "failed to register shared memory region: '%s' is not the name of a shared memory object", key)
	}
	root, err := os.OpenRoot(Folder)
	if err != nil {
		return nil, errcode.Errorf(errcode.Internal, "Unable to open shared memory region: '%s': %w", key, err)
	}
	defer root.Close()
	file, err := root.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		var cause error = err
		if p, ok := err.(*os.PathError); ok {
			cause = p.Err
		}
		return nil, errcode.Errorf(errcode.Internal, "Unable to open shared memory region: '%s': %w (server and client must share %s: same machine, same IPC namespace)", key, cause, Folder)
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		file.Close()
		return nil, errcode.Errorf(errcode.InvalidArg, "failed to register shared memory region: '%s' is not a shared memory object", key)
	}
	return file, nil
}

// Status lists the region of that name, or all of them, by name, for an empty name.
// Errors: NotFound.
func (r *Registry) Status(name string) ([]Info, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if name != "" {
		region := r.regions[name]
		if region == nil {
			return nil, errcode.Errorf(errcode.NotFound, "Unable to find system shared memory region: '%s'", name)
		}
		return []Info{region.Info}, nil
	}
	out := make([]Info, 0, len(r.regions))
	for _, region := range r.regions {
		out = append(out, region.Info)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out, nil
}

// Unregister takes the region of that name away, or all of them for an empty name. A region
// in use is marked, refused to new requests, and ends with the last request that uses it;
// its name is free when that is done.
func (r *Registry) Unregister(name string) {
	r.mu.Lock()
	var ended []*Region
	for key, region := range r.regions {
		if name != "" && key != name {
			continue
		}
		region.gone = true
		if region.uses == 0 {
			ended = append(ended, r.end(region))
		}
	}
	r.mu.Unlock()
	r.forget(ended...)
}

// Close unregisters everything.
func (r *Registry) Close() { r.Unregister("") }

func (r *Registry) end(region *Region) *Region {
	delete(r.regions, region.Name)
	region.file.Close()
	return region
}

func (r *Registry) forget(ended ...*Region) {
	for _, region := range ended {
		if r.Forget != nil {
			r.Forget(region.Number)
		}
	}
}

// Use checks that byteSize bytes at offset of the region lie in it, and that the object has
// them now, and takes a reference, which the caller gives back with Release. The returned
// offset counts from the object's beginning.
// Errors: NotFound for an unknown name; InvalidArg for bounds.
func (r *Registry) Use(name string, offset, byteSize uint64) (*Region, uint64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	region := r.regions[name]
	if region == nil || region.gone {
		return nil, 0, errcode.Errorf(errcode.NotFound, "Unable to find shared memory region: '%s'", name)
	}
	if offset >= region.ByteSize && byteSize > 0 {
		return nil, 0, errcode.Errorf(errcode.InvalidArg, "Invalid offset for shared memory region: '%s'", name)
	}
	end, ok := tensor.End(offset, byteSize, region.ByteSize)
	if !ok {
		return nil, 0, errcode.Errorf(errcode.InvalidArg, "Invalid offset + byte size for shared memory region: '%s'", name)
	}
	size, err := shm.FileByteSize(region.file)
	if err != nil {
		return nil, 0, errcode.Errorf(errcode.Internal, "shared memory region '%s': %w", name, err)
	}
	if size < region.Offset+end {
		return nil, 0, errcode.Errorf(errcode.InvalidArg, "Invalid offset + byte size for shared memory region: '%s': its object '%s' was truncated to %d bytes after it was registered", name, region.Key, size)
	}
	region.uses++
	return region, region.Offset + offset, nil
}

// Release gives a reference back.
func (r *Region) Release() {
	g := r.registry
	g.mu.Lock()
	r.uses--
	ended := r.gone && r.uses == 0
	if ended {
		g.end(r)
	}
	g.mu.Unlock()
	if ended {
		g.forget(r)
	}
}

// FD is the descriptor to send to a stub; it stays the region's.
func (r *Region) FD() int { return int(r.file.Fd()) }

// MapByteSize is how much of the object a stub maps to reach all of the region.
func (r *Region) MapByteSize() uint64 { return r.Offset + r.ByteSize }
