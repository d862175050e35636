package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/nereid-serve/nereid/host"
)

// settings are the values of serve's flags.
type settings struct {
	host                          host.Options
	control                       string
	exitOnError                   bool
	exitTimeout                   uint
	backendConfig                 []string
	logVerbose                    int
	logInfo, logWarning, logError bool
	logFormat, logFile            string
}

// boolean is a flag that takes its value with "=" or a space, as tritonserver's do.
type boolean struct{ value *bool }

func (b boolean) String() string {
	if b.value == nil {
		return ""
	}
	return strconv.FormatBool(*b.value)
}
func (b boolean) Type() string { return "boolean" }
func (b boolean) Set(s string) error {
	switch strings.ToLower(s) {
	case "true", "1", "on":
		*b.value = true
	case "false", "0", "off":
		*b.value = false
	default:
		return fmt.Errorf("expected true or false, got %q", s)
	}
	return nil
}

// later is a flag of tritonserver that this server knows and does not carry out.
type later struct {
	name string
	note string
}

func (later) String() string { return "" }
func (later) Type() string   { return "value" }
func (l later) Set(string) error {
	text := "tritonserver's --" + l.name + " is not supported yet; start without it"
	if l.note != "" {
		text += " (" + l.note + ")"
	}
	return errors.New(text)
}

// notSupported are the flags of tritonserver 2.51 that serve refuses. Source: its --help.
var notSupported = []string{
	"repository-poll-secs", "model-config-name", "model-load-thread-count", "model-load-retry-count", "model-namespacing",
	"enable-peer-access", "reuse-http-port", "http-header-forward-pattern", "http-thread-count", "http-restricted-api",
	"reuse-grpc-port", "grpc-header-forward-pattern", "grpc-infer-allocation-pool-size", "grpc-use-ssl", "grpc-use-ssl-mutual",
	"grpc-server-cert", "grpc-server-key", "grpc-root-cert", "grpc-infer-response-compression-level", "grpc-keepalive-time",
	"grpc-keepalive-timeout", "grpc-keepalive-permit-without-calls", "grpc-http2-max-pings-without-data",
	"grpc-http2-min-recv-ping-interval-without-data", "grpc-http2-max-ping-strikes", "grpc-max-connection-age",
	"grpc-max-connection-age-grace", "grpc-restricted-protocol", "allow-sagemaker", "sagemaker-port",
	"sagemaker-safe-port-range", "sagemaker-thread-count", "allow-vertex-ai", "vertex-ai-port", "vertex-ai-thread-count",
	"vertex-ai-default-model", "allow-gpu-metrics", "allow-cpu-metrics", "metrics-interval-ms", "metrics-config",
	"trace-config", "repoagent-directory", "cache-config", "cache-directory", "rate-limit", "rate-limit-resource",
	"pinned-memory-pool-byte-size", "cuda-memory-pool-byte-size", "cuda-virtual-address-size",
	"min-supported-compute-capability", "buffer-manager-thread-count", "host-policy", "model-load-gpu-limit",
	"strict-model-config", "response-cache-byte-size", "trace-file", "trace-level", "trace-rate", "trace-count",
	"trace-log-frequency",
}

func addFlags(f *pflag.FlagSet, s *settings) {
	s.host = host.DefaultOptions()
	o := &s.host
	s.exitOnError, s.logInfo, s.logWarning, s.logError = true, true, true, true
	s.exitTimeout = uint(o.ExitTimeout / time.Second)
	toggle := func(value *bool, name, usage string) { f.Var(boolean{value}, name, usage) }

	f.StringArrayVar(&o.ModelRepositories, "model-repository", nil, "`folder` with models; may be given several times")
	f.StringArrayVar(&o.ModelRepositories, "model-store", nil, "the same as --model-repository")
	f.StringVar(&s.control, "model-control-mode", "none", "`mode`: none (every model is loaded at the start) or explicit (clients load and unload)")
	f.StringArrayVar(&o.LoadModels, "load-model", nil, "`name` of a model to load at the start, * for all; with --model-control-mode=explicit; may be given several times")
	toggle(&s.exitOnError, "exit-on-error", "end when a model can't be loaded at the start")
	toggle(&o.StrictReadiness, "strict-readiness", "the server is ready only while every model is")
	f.UintVar(&s.exitTimeout, "exit-timeout-secs", s.exitTimeout, "`seconds` to let requests end in when the server is stopped")
	f.StringVar(&o.ID, "id", o.ID, "`name` of the server in its metadata")

	endpoint := func(l *host.Listen, name string) {
		toggle(&l.Allow, "allow-"+name, "serve the "+name+" endpoint")
		f.StringVar(&l.Address, name+"-address", l.Address, "`address` of the "+name+" endpoint")
		f.IntVar(&l.Port, name+"-port", l.Port, "`port` of the "+name+" endpoint; 0 takes a free one")
	}
	endpoint(&o.HTTP, "http")
	endpoint(&o.GRPC, "grpc")
	endpoint(&o.Metrics, "metrics")

	f.StringArrayVar(&o.BackendDirectories, "backend-directory", nil, "`folder` with programs nereid-backend-<name>; the folder of this program is searched after it")
	f.StringArrayVar(&s.backendConfig, "backend-config", nil, "`<backend>,<key>=<value>`: a setting for a backend; may be given several times")
	f.Uint64Var(&o.InputArenaByteSize, "input-arena-byte-size", o.InputArenaByteSize, "most `bytes` of inputs that one model version's requests may hold; requests wait when it is used up")
	f.Uint64Var(&o.OutputArenaByteSize, "output-arena-byte-size", o.OutputArenaByteSize, "most `bytes` of outputs that one stub's responses may hold")
	f.Int64Var(&o.MaxRequestByteSize, "max-request-byte-size", o.MaxRequestByteSize, "most `bytes` of one request, also when unpacked")

	f.IntVar(&s.logVerbose, "log-verbose", 0, "`level` of verbose log lines; 0 is none")
	toggle(&s.logInfo, "log-info", "log information")
	toggle(&s.logWarning, "log-warning", "log warnings")
	toggle(&s.logError, "log-error", "log errors")
	f.StringVar(&s.logFormat, "log-format", "default", "`format`: default or ISO8601")
	f.StringVar(&s.logFile, "log-file", "", "`file` to append the log to, instead of standard error")

	for _, name := range notSupported {
		f.Var(later{name: name}, name, "")
		_ = f.MarkHidden(name) // it exists
	}
	f.Var(later{"disable-auto-complete-config", "this server completes no configuration, so it changes nothing"}, "disable-auto-complete-config", "")
	f.Lookup("disable-auto-complete-config").NoOptDefVal = "true"
	_ = f.MarkHidden("disable-auto-complete-config")
	f.SortFlags = false
}

// finish checks what the flags say together and fills the options in.
func (s *settings) finish() error {
	o := &s.host
	if len(o.ModelRepositories) == 0 {
		return errors.New("--model-repository is missing: name a folder with models, such as examples/identity/models")
	}
	switch s.control {
	case "none":
		if len(o.LoadModels) > 0 {
			return errors.New("--load-model needs --model-control-mode=explicit")
		}
	case "explicit":
		o.Explicit = true
	case "poll":
		return errors.New("--model-control-mode=poll is not supported yet; use none or explicit")
	default:
		return fmt.Errorf("--model-control-mode=%s: expected none or explicit", s.control)
	}
	if len(o.LoadModels) > 1 {
		for _, m := range o.LoadModels {
			if m == "*" {
				return errors.New("--load-model=* loads every model and can't be given beside another --load-model")
			}
		}
	}
	o.ExitTimeout = time.Duration(s.exitTimeout) * time.Second
	o.BackendConfig = map[string]map[string]string{}
	for _, text := range s.backendConfig {
		backend, key, value, err := host.BackendSetting(text)
		if err != nil {
			return err
		}
		if o.BackendConfig[backend] == nil {
			o.BackendConfig[backend] = map[string]string{}
		}
		o.BackendConfig[backend][key] = value
	}
	if o.MaxRequestByteSize <= 0 {
		return fmt.Errorf("--max-request-byte-size=%d must be positive", o.MaxRequestByteSize)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o.BackendDirectories = append(o.BackendDirectories, filepath.Dir(self))
	o.PythonStub = []string{self, pythonStub}
	o.LogVerbose = s.logVerbose
	return nil
}
