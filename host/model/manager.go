// Package model has the live models: their versions, states and in-flight requests, and the
// acts of loading, swapping and unloading.
//
// Lock order: Manager.mu before Version.mu. Neither is held while a stub is started, loaded
// or ended; a lock of each model's own makes loads and unloads of one model take turns.
package model

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/modelconfig"
	"github.com/nereid-serve/nereid/host/region"
	"github.com/nereid-serve/nereid/host/repository"
	"github.com/nereid-serve/nereid/host/supervisor"
	configpb "github.com/nereid-serve/nereid/proto/config"
)

// Launcher says how to start the stub of a model.
type Launcher interface {
	Spec(config *configpb.ModelConfig, version int64, directory string) (supervisor.Spec, error)
}

// Options of a Manager; all are required.
type Options struct {
	Repository          *repository.Repository
	Regions             *region.Registry
	Launcher            Launcher
	Logger              *slog.Logger
	LogVerbose          int
	BackendConfig       map[string]map[string]string // by backend
	InputArenaByteSize  uint64
	OutputArenaByteSize uint64
	StartTimeout        time.Duration // for a stub's handshake, and for a restart
	DrainTimeout        time.Duration
}

// Manager has the models of one server.
type Manager struct {
	options *Options
	ctx     context.Context // until Close
	cancel  context.CancelFunc

	mu     sync.RWMutex
	models map[string]*entry
	ending sync.WaitGroup
}

// entry is one model that the server was asked for.
type entry struct {
	acts        sync.Mutex // one load or unload at a time
	fingerprint string
	versions    []*Version // live or failed, ascending
	failure     string     // why there is none
	unloaded    bool
}

// New makes a manager without models.
func New(o *Options) *Manager {
	m := &Manager{options: o, models: map[string]*entry{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.ending.Go(m.trimIdle)
	o.Regions.Forget = func(number uint32) {
		for _, v := range m.Versions("") {
			v.ForgetRegion(number)
		}
	}
	return m
}

// idleAfter is how long an input arena keeps pages that nobody uses.
const idleAfter = 15 * time.Second

func (m *Manager) trimIdle() {
	tick := time.NewTicker(idleAfter)
	defer tick.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
			for _, v := range m.Versions("") {
				v.trimIdle()
			}
		}
	}
}

func (m *Manager) entry(name string) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.models[name]
	if e == nil {
		e = &entry{}
		m.models[name] = e
	}
	return e
}

// Load makes a model live: its new versions are loaded beside the old ones, take their place
// when they are ready, and the old ones drain and end. A failed load leaves the old ones
// serving. A model whose files have not changed is left as it is.
// Errors: Internal, with the reason.
func (m *Manager) Load(ctx context.Context, name modelconfig.ModelName) error {
	found, err := m.options.Repository.Find(name)
	if found == nil {
		return errcode.Errorf(errcode.Internal, "failed to load '%s', failed to poll from model repository: %w", name, err)
	}
	e := m.entry(string(name))
	e.acts.Lock()
	defer e.acts.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)()
	if ctx.Err() != nil {
		return errcode.Errorf(errcode.Unavailable, "load of '%s': the server is stopping", name)
	}
	if err != nil {
		return m.fail(e, name, err)
	}
	m.mu.RLock()
	unchanged := e.fingerprint == found.Fingerprint && !e.unloaded && len(e.versions) > 0
	for _, v := range e.versions {
		state, _ := v.State()
		unchanged = unchanged && state == Ready
	}
	m.mu.RUnlock()
	if unchanged {
		return nil
	}
	if found.Config.GetEnsembleScheduling() != nil {
		return m.fail(e, name, errcode.Errorf(errcode.Unsupported, "ensemble_scheduling is not supported yet"))
	}
	fresh := make([]*Version, len(found.Versions))
	for i, number := range found.Versions {
		fresh[i] = newVersion(m.options, found, number)
	}
	m.mu.Lock()
	if len(e.versions) == 0 || e.unloaded {
		e.versions, e.failure, e.unloaded = fresh, "", false // the index shows LOADING
	}
	m.mu.Unlock()
	errs := make([]error, len(fresh))
	var loading sync.WaitGroup
	for i, v := range fresh {
		loading.Go(func() { errs[i] = v.load(ctx) })
	}
	loading.Wait()
	var reasons []string
	for i, err := range errs {
		if err != nil {
			reasons = append(reasons, fmt.Sprintf("version %d: %v", fresh[i].Number, err))
			m.options.Logger.Error("failed to load model", "model", name, "version", fresh[i].Number, "reason", err.Error())
		}
	}
	m.mu.Lock()
	old := e.versions
	if len(reasons) > 0 && len(old) > 0 && old[0] != fresh[0] {
		m.mu.Unlock()
		m.retire(fresh)
		return errcode.Errorf(errcode.Internal, "load failed for model '%s': %s", name, strings.Join(reasons, "; "))
	}
	e.versions, e.fingerprint, e.unloaded = fresh, found.Fingerprint, false
	if len(reasons) > 0 {
		e.fingerprint = ""
	}
	m.mu.Unlock()
	if len(old) > 0 && old[0] != fresh[0] {
		m.retire(old)
	}
	if len(reasons) > 0 {
		return errcode.Errorf(errcode.Internal, "load failed for model '%s': %s", name, strings.Join(reasons, "; "))
	}
	return nil
}

// fail notes why a model can't be loaded, unless an older version of it serves.
func (m *Manager) fail(e *entry, name modelconfig.ModelName, err error) error {
	m.options.Logger.Error("failed to load model", "model", name, "reason", err.Error())
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(e.versions) == 0 || e.unloaded {
		e.versions, e.failure, e.unloaded = nil, err.Error(), false
	}
	return errcode.Errorf(errcode.Internal, "load failed for model '%s': %w", name, err)
}

// retire takes no more requests for versions, and ends them in the background.
func (m *Manager) retire(versions []*Version) {
	for _, v := range versions {
		if v.stubless() {
			continue
		}
		v.setState(Unloading, "", false)
		m.ending.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), m.options.DrainTimeout)
			defer cancel()
			v.unload(ctx)
		})
	}
}

// stubless tells whether the version never had a stub, or has none any more.
func (v *Version) stubless() bool {
	select {
	case <-v.ended:
		return true
	default:
		return false
	}
}

// Unload ends a model; a model that is not live is no error. Errors: NotFound for one that
// the repositories don't have either.
func (m *Manager) Unload(name modelconfig.ModelName) error {
	m.mu.RLock()
	e := m.models[string(name)]
	m.mu.RUnlock()
	if e == nil {
		return nil
	}
	e.acts.Lock()
	defer e.acts.Unlock()
	m.mu.Lock()
	versions := e.versions
	e.unloaded = true
	m.mu.Unlock()
	m.retire(versions)
	return nil
}

// StopLoading makes loads under way fail, and those that come: the server is stopping.
func (m *Manager) StopLoading() { m.cancel() }

// Close drains and ends every model; ctx bounds the drain.
func (m *Manager) Close(ctx context.Context) {
	m.cancel()
	m.mu.RLock()
	var entries []*entry
	for _, e := range m.models {
		entries = append(entries, e)
	}
	m.mu.RUnlock()
	var closing sync.WaitGroup
	for _, e := range entries {
		closing.Go(func() {
			e.acts.Lock()
			defer e.acts.Unlock()
			for _, v := range e.versions {
				if !v.stubless() {
					closing.Go(func() { v.unload(ctx) })
				}
			}
		})
	}
	closing.Wait()
	m.ending.Wait()
}

// Lookup finds the version that a request asks for, "" for the highest that is ready, and
// counts the request as in flight until Release.
// Errors: NotFound; InvalidArg for a version that is no number; Unavailable.
func (m *Manager) Lookup(name, version string) (*Version, error) {
	v, err := m.Find(name, version)
	for err == nil && !v.acquire() {
		// A swap may have come between: then another version is found now.
		refused := v
		if v, err = m.Find(name, version); v == refused {
			state, reason := v.State()
			if reason == "" {
				reason = string(state)
			}
			return nil, errcode.Errorf(errcode.Unavailable, "Request for unknown model: '%s' version %d is not at ready state: %s", name, v.Number, reason)
		}
	}
	return v, err
}

// Find is Lookup for readers: it counts nothing, and finds only what is live.
func (m *Manager) Find(name, version string) (*Version, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	e := m.models[name]
	if e == nil || e.unloaded || len(e.versions) == 0 {
		return nil, errcode.Errorf(errcode.NotFound, "Request for unknown model: '%s' is not found", name)
	}
	if version == "" {
		for _, v := range slices.Backward(e.versions) {
			if state, _ := v.State(); state == Ready {
				return v, nil
			}
		}
		last := e.versions[len(e.versions)-1]
		if last.takes() {
			return last, nil
		}
		return nil, errcode.Errorf(errcode.NotFound, "Request for unknown model: '%s' has no available versions", name)
	}
	number, err := strconv.ParseInt(version, 10, 64)
	if err != nil {
		return nil, errcode.Errorf(errcode.InvalidArg, "failed to get model version from specified version string '%s' (an integer is expected)", version)
	}
	for _, v := range e.versions {
		if v.Number == number {
			if state, _ := v.State(); state == Ready || v.takes() {
				return v, nil
			}
			return nil, errcode.Errorf(errcode.NotFound, "Request for unknown model: '%s' version %d is not at ready state", name, number)
		}
	}
	return nil, errcode.Errorf(errcode.NotFound, "Request for unknown model: '%s' version %d is not found", name, number)
}

// takes tells whether requests may wait for the version's stub.
func (v *Version) takes() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.accepting
}

// Versions lists the versions of one model, or of all for "", by name and number; also ones
// that are not ready.
func (m *Manager) Versions(name string) []*Version {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var out []*Version
	for n, e := range m.models {
		if name == "" || n == name {
			out = append(out, e.versions...)
		}
	}
	sort.Slice(out, func(i, j int) bool {
		return out[i].Name < out[j].Name || out[i].Name == out[j].Name && out[i].Number < out[j].Number
	})
	return out
}

// IndexRow is one line of the repository index. Version is "" for a model without versions.
type IndexRow struct {
	Name, Version string
	State         State // "" for a model never asked for
	Reason        string
}

// Index lists the models of the repositories and the live ones.
func (m *Manager) Index() ([]IndexRow, error) {
	names, err := m.options.Repository.Names()
	if err != nil {
		return nil, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	for n := range m.models {
		if name := modelconfig.ModelName(n); !slices.Contains(names, name) && len(m.models[n].versions) > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var out []IndexRow
	for _, n := range names {
		e := m.models[string(n)]
		switch {
		case e == nil:
			out = append(out, IndexRow{Name: string(n)})
		case len(e.versions) == 0:
			state := Unavailable
			if e.failure == "" && !e.unloaded {
				state = ""
			}
			out = append(out, IndexRow{Name: string(n), State: state, Reason: e.failure})
		}
		if e != nil {
			for _, v := range e.versions {
				state, reason := v.State()
				out = append(out, IndexRow{string(n), strconv.FormatInt(v.Number, 10), state, reason})
			}
		}
	}
	return out, nil
}

// AllReady tells whether every model that was asked for is ready, and whether none is still
// loading.
func (m *Manager) AllReady() bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, e := range m.models {
		if e.unloaded {
			continue
		}
		if len(e.versions) == 0 && e.failure != "" {
			return false
		}
		for _, v := range e.versions {
			if state, _ := v.State(); state != Ready {
				return false
			}
		}
	}
	return true
}
