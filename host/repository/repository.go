// Package repository finds models in folders: which there are, which versions a policy picks,
// and whether their files changed. Access goes through os.Root, so that no name leads out.
package repository

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/modelconfig"
	configpb "github.com/nereid-serve/nereid/proto/config"
)

const maxConfigByteSize = 16 << 20

// Repository is a list of folders that hold models; the first that has a model wins, and a
// model in two of them is an error, as which one would serve can't be told.
type Repository struct{ paths []string }

// Open checks that every folder is there.
func Open(paths []string) (*Repository, error) {
	r := &Repository{}
	for _, p := range paths {
		abs, err := filepath.Abs(p)
		if err != nil {
			return nil, err
		}
		if info, err := os.Stat(abs); err != nil || !info.IsDir() {
			return nil, errcode.Errorf(errcode.InvalidArg, "--model-repository=%s: no such folder", p)
		}
		r.paths = append(r.paths, abs)
	}
	return r, nil
}

// Model is what the repository says about one model now.
type Model struct {
	Name      modelconfig.ModelName
	Directory string // absolute
	Config    *configpb.ModelConfig
	Versions  []int64 // that the version policy picks, ascending
	// Fingerprint changes when a file of the model does.
	Fingerprint string
}

// Names lists the folders that may be models, sorted.
func (r *Repository) Names() ([]modelconfig.ModelName, error) {
	seen := map[modelconfig.ModelName]bool{}
	for _, p := range r.paths {
		entries, err := os.ReadDir(p)
		if err != nil {
			return nil, errcode.Errorf(errcode.Internal, "list model repository: %w", err)
		}
		for _, e := range entries {
			name, err := modelconfig.ParseName(e.Name())
			if err == nil && e.Name()[0] != '.' && isDir(p, e) {
				seen[name] = true
			}
		}
	}
	out := make([]modelconfig.ModelName, 0, len(seen))
	for n := range seen {
		out = append(out, n)
	}
	slices.Sort(out)
	return out, nil
}

func isDir(parent string, e fs.DirEntry) bool {
	if e.Type()&fs.ModeSymlink != 0 {
		info, err := os.Stat(filepath.Join(parent, e.Name()))
		return err == nil && info.IsDir()
	}
	return e.IsDir()
}

// Find reads a model. The Model is not nil when its folder was found, even with an error,
// which is then the reason why the model can't be served.
// Errors: NotFound where no repository has it; InvalidArg for what is wrong with it.
func (r *Repository) Find(name modelconfig.ModelName) (*Model, error) {
	var found []string
	for _, p := range r.paths {
		if info, err := os.Stat(filepath.Join(p, string(name))); err == nil && info.IsDir() {
			found = append(found, filepath.Join(p, string(name)))
		}
	}
	switch len(found) {
	case 0:
		return nil, errcode.Errorf(errcode.NotFound, "no model '%s' in the model repository", name)
	case 1:
	default:
		return nil, errcode.Errorf(errcode.InvalidArg, "model '%s' is in two repositories: %s, %s", name, found[0], found[1])
	}
	m := &Model{Name: name, Directory: found[0]}
	root, err := os.OpenRoot(m.Directory)
	if err != nil {
		return m, errcode.Errorf(errcode.Internal, "open model '%s': %w", name, err)
	}
	defer root.Close()
	if m.Fingerprint, err = fingerprint(root); err != nil {
		return m, errcode.Errorf(errcode.Internal, "read model '%s': %w", name, err)
	}
	text, err := readConfig(root)
	if err != nil {
		return m, err
	}
	if m.Config, err = modelconfig.Parse(text); err != nil {
		return m, err
	}
	if err := modelconfig.Normalize(m.Config, name); err != nil {
		return m, err
	}
	if err := modelconfig.Validate(m.Config); err != nil {
		return m, err
	}
	m.Versions, err = pickVersions(root, m.Config)
	return m, err
}

func readConfig(root *os.Root) ([]byte, error) {
	info, err := root.Stat("config.pbtxt")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errcode.Errorf(errcode.InvalidArg, "config.pbtxt is missing, and completing a configuration automatically is not supported yet")
	}
	if err == nil && info.Size() > maxConfigByteSize {
		return nil, errcode.Errorf(errcode.InvalidArg, "config.pbtxt has %d bytes, at most %d are allowed", info.Size(), maxConfigByteSize)
	}
	text, err := root.ReadFile("config.pbtxt")
	if err != nil {
		return nil, errcode.Errorf(errcode.Internal, "read config.pbtxt: %w", err)
	}
	return text, nil
}

// pickVersions applies the version policy to the numbered folders.
func pickVersions(root *os.Root, c *configpb.ModelConfig) ([]int64, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	var all []int64
	for _, e := range entries {
		n, err := strconv.ParseInt(e.Name(), 10, 64)
		if err == nil && n > 0 && strconv.FormatInt(n, 10) == e.Name() && isDir(root.Name(), e) {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	var out []int64
	switch policy := c.VersionPolicy.PolicyChoice.(type) {
	case *configpb.ModelVersionPolicy_All_:
		out = all
	case *configpb.ModelVersionPolicy_Latest_:
		out = all[max(0, len(all)-int(min(policy.Latest.NumVersions, 1<<30))):]
	case *configpb.ModelVersionPolicy_Specific_:
		for _, v := range policy.Specific.Versions {
			if !slices.Contains(all, v) {
				return nil, errcode.Errorf(errcode.InvalidArg, "version %d, which version_policy names, has no folder for model '%s'", v, c.Name)
			}
			if !slices.Contains(out, v) {
				out = append(out, v)
			}
		}
		slices.Sort(out)
	}
	if len(out) == 0 {
		return nil, errcode.Errorf(errcode.InvalidArg, "at least one version must be available under the version policy of model '%s'", c.Name)
	}
	return out, nil
}

// fingerprint sums up names, sizes and times of a model's files.
func fingerprint(root *os.Root) (string, error) {
	var lines []string
	err := fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == "__pycache__" {
				return fs.SkipDir // written by the model's own run
			}
			lines = append(lines, path)
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		lines = append(lines, fmt.Sprintf("%s %d %d", path, info.Size(), info.ModTime().UnixNano()))
		return nil
	})
	if err != nil {
		return "", err
	}
	sort.Strings(lines)
	h := sha256.New()
	for _, l := range lines {
		fmt.Fprintln(h, l)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
