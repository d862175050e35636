package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// logHandler writes lines as tritonserver does: "I1121 05:13:00.123456 4711 host.go:12] text",
// or with an ISO 8601 time.
type logHandler struct {
	mu      *sync.Mutex
	out     io.Writer
	iso     bool
	enabled func(slog.Level) bool
	attrs   string
}

func newLogger(s *settings) (*slog.Logger, func(), error) {
	out, done := io.Writer(os.Stderr), func() {}
	if s.logFile != "" {
		f, err := os.OpenFile(s.logFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, nil, fmt.Errorf("--log-file: %w", err)
		}
		out, done = f, func() { f.Close() }
	}
	if s.logFormat != "default" && s.logFormat != "ISO8601" {
		done()
		return nil, nil, fmt.Errorf("--log-format=%s: expected default or ISO8601", s.logFormat)
	}
	enabled := func(l slog.Level) bool {
		switch {
		case l >= slog.LevelError:
			return s.logError
		case l >= slog.LevelWarn:
			return s.logWarning
		case l >= slog.LevelInfo:
			return s.logInfo
		}
		return s.logVerbose > 0
	}
	return slog.New(&logHandler{mu: &sync.Mutex{}, out: out, iso: s.logFormat == "ISO8601", enabled: enabled}), done, nil
}

func (h *logHandler) Enabled(_ context.Context, l slog.Level) bool { return h.enabled(l) }

func (h *logHandler) WithGroup(string) slog.Handler { return h }

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	clone := *h
	for _, a := range attrs {
		clone.attrs += attrText(a)
	}
	return &clone
}

func attrText(a slog.Attr) string {
	value := a.Value.String()
	if strings.ContainsAny(value, " \t\"") || plain(value) != value {
		value = strconv.Quote(value)
	}
	return " " + a.Key + "=" + value
}

// plain takes control characters out of a message: one record is one line, whatever a client
// or a model put into it.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f {
			return '\ufffd'
		}
		return r
	}, s)
}

func (h *logHandler) Handle(_ context.Context, r slog.Record) error {
	letter := "V"
	switch {
	case r.Level >= slog.LevelError:
		letter = "E"
	case r.Level >= slog.LevelWarn:
		letter = "W"
	case r.Level >= slog.LevelInfo:
		letter = "I"
	}
	var b strings.Builder
	if h.iso {
		fmt.Fprintf(&b, "%s %s %d", r.Time.UTC().Format("2006-01-02T15:04:05Z"), letter, os.Getpid())
	} else {
		fmt.Fprintf(&b, "%s%s %d", letter, r.Time.Format("0102 15:04:05.000000"), os.Getpid())
	}
	if frame, _ := runtime.CallersFrames([]uintptr{r.PC}).Next(); frame.File != "" {
		fmt.Fprintf(&b, " %s:%d", filepath.Base(frame.File), frame.Line)
	}
	b.WriteString("] " + plain(r.Message) + h.attrs)
	r.Attrs(func(a slog.Attr) bool {
		b.WriteString(attrText(a))
		return true
	})
	b.WriteByte('\n')
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := io.WriteString(h.out, b.String())
	return err
}
