package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/nereid-serve/nereid/host"
	"github.com/nereid-serve/nereid/host/model"
)

func serveCommand() *cobra.Command {
	s := &settings{}
	cmd := &cobra.Command{
		Use:   "serve --model-repository=FOLDER [flags]",
		Short: "Serve the models of a repository",
		Long: "Serve the models of a repository over gRPC and HTTP.\n\n" +
			"A repository is a folder with a folder for each model: config.pbtxt, and numbered version\n" +
			"folders with the model's files. backend: \"python\" runs a Triton model.py; any other name\n" +
			"is a program nereid-backend-<name> in the backend directory or beside the model.\n\n" +
			"Flags are spelled as tritonserver's, with \"=\" or a space before the value. Those of its\n" +
			"flags that are missing here are refused.\n\n" +
			"SIGTERM or Ctrl-C stops it: it says not ready, lets requests end, ends the backends. A\n" +
			"second one ends it at once.",
		Example: "  nereid serve --model-repository=examples/identity/models\n" +
			"  nereid serve --model-repository=models --model-control-mode=explicit --load-model=resnet --http-port=8080",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return serve(s) },
	}
	addFlags(cmd.Flags(), s)
	return cmd
}

func serve(s *settings) error {
	if err := s.finish(); err != nil {
		return err
	}
	logger, done, err := newLogger(s)
	if err != nil {
		return err
	}
	defer done()
	s.host.Logger = logger
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	starting, cancel := context.WithCancel(context.Background())
	defer cancel()
	interrupted := make(chan os.Signal, 1)
	go func() {
		interrupted <- <-signals
		cancel() // also a start that is under way
		<-signals
		logger.Error("second signal: ending at once")
		os.Exit(1)
	}()
	// The heap is small, as tensors are not on it: collecting it at twice its size would be
	// most of the collector's work for nothing.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	began := time.Now()
	h, err := host.Start(starting, s.host)
	var failed *host.LoadError
	if err != nil && (h == nil || !errors.As(err, &failed)) {
		if h != nil {
			shutdown(h, s, logger)
		}
		return err
	}
	printModels(os.Stdout, h)
	if failed != nil && s.exitOnError {
		shutdown(h, s, logger)
		return fmt.Errorf("failed to load all models; start with --exit-on-error=false to serve the others:\n%w", failed)
	}
	printAddresses(os.Stdout, h, time.Since(began))
	select {
	case sig := <-interrupted:
		logger.Info("stopping", "signal", sig.String())
	case err = <-h.Failed():
		logger.Error("stopping", "error", err)
	}
	shutdown(h, s, logger)
	logger.Info("stopped")
	if failed != nil {
		return nil
	}
	return err
}

func shutdown(h *host.Host, s *settings, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), s.host.ExitTimeout)
	defer cancel()
	h.Shutdown(ctx)
	if ctx.Err() != nil {
		logger.Warn("the exit timeout passed before every request had ended")
	}
}

func printModels(out io.Writer, h *host.Host) {
	rows, err := h.Models()
	if err != nil {
		return
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "MODEL\tVERSION\tSTATUS\tREASON")
	for _, r := range rows {
		if r.State == "" {
			r.State, r.Reason = "-", "not loaded"
		}
		reason, _, more := strings.Cut(r.Reason, "\n")
		if more {
			lines := strings.Split(strings.TrimSpace(r.Reason), "\n")
			reason += " ... " + strings.TrimSpace(lines[len(lines)-1])
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Name, r.Version, r.State, plain(reason))
	}
	w.Flush()
}

func printAddresses(out io.Writer, h *host.Host, took time.Duration) {
	addresses := h.Addresses()
	for _, name := range []string{"grpc", "http", "metrics"} {
		if a, ok := addresses[name]; ok {
			fmt.Fprintf(out, "%-8s %s\n", name, reachable(a))
		}
	}
	fmt.Fprintf(out, "ready after %s\n", took.Round(time.Millisecond))
	rows, err := h.Models()
	if err != nil || addresses["http"] == "" {
		return
	}
	for _, r := range rows {
		if r.State == model.Ready {
			fmt.Fprintf(out, "\nTry a first request:\n  %s\n", h.FirstRequest(r.Name, "http://"+reachable(addresses["http"])))
			return
		}
	}
}

// reachable is an address that a client on this machine can use.
func reachable(address string) string {
	hostname, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(hostname); err == nil && ip != nil && ip.IsUnspecified() {
		return net.JoinHostPort("localhost", port)
	}
	return address
}
