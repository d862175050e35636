// Package metrics shows the counters of a server to Prometheus, on a port of its own.
package metrics

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/nereid-serve/nereid/host/model"
	"github.com/nereid-serve/nereid/host/stats"
)

// Source of the nv_ names and labels: Triton's metrics document.
var (
	labels   = []string{"model", "version"}
	requests = []struct {
		desc  *prometheus.Desc
		value func(s *snapshot) float64
		kind  prometheus.ValueType
	}{
		{desc("nv_inference_request_success", "Number of successful inference requests, all batch sizes"), func(s *snapshot) float64 { return float64(s.Success.Count) }, prometheus.CounterValue},
		{desc("nv_inference_count", "Number of inferences performed (does not include cached requests)"), func(s *snapshot) float64 { return float64(s.InferenceCount) }, prometheus.CounterValue},
		{desc("nv_inference_exec_count", "Number of model executions performed (does not include cached requests)"), func(s *snapshot) float64 { return float64(s.ExecutionCount) }, prometheus.CounterValue},
		{desc("nv_inference_request_duration_us", "Cumulative inference request duration in microseconds (includes cached requests)"), func(s *snapshot) float64 { return float64(s.Success.NS / 1000) }, prometheus.CounterValue},
		{desc("nv_inference_queue_duration_us", "Cumulative inference queuing duration in microseconds (includes cached requests)"), func(s *snapshot) float64 { return float64(s.Queue.NS / 1000) }, prometheus.CounterValue},
		{desc("nv_inference_compute_input_duration_us", "Cumulative compute input duration in microseconds (does not include cached requests)"), func(s *snapshot) float64 { return float64(s.ComputeInput.NS / 1000) }, prometheus.CounterValue},
		{desc("nv_inference_compute_infer_duration_us", "Cumulative compute inference duration in microseconds (does not include cached requests)"), func(s *snapshot) float64 { return float64(s.ComputeInfer.NS / 1000) }, prometheus.CounterValue},
		{desc("nv_inference_compute_output_duration_us", "Cumulative inference compute output duration in microseconds (does not include cached requests)"), func(s *snapshot) float64 { return float64(s.ComputeOutput.NS / 1000) }, prometheus.CounterValue},
		{desc("nv_inference_pending_request_count", "Instantaneous number of pending requests awaiting execution per-model"), func(s *snapshot) float64 { return float64(s.Pending) }, prometheus.GaugeValue},
		{desc("nereid_input_arena_used_bytes", "Bytes of the input arena on loan to requests"), func(s *snapshot) float64 { return float64(s.used) }, prometheus.GaugeValue},
		{desc("nereid_input_arena_peak_bytes", "Most bytes of the input arena ever on loan"), func(s *snapshot) float64 { return float64(s.peak) }, prometheus.GaugeValue},
		{desc("nereid_input_arena_bytes", "Bytes of the input arena's segments"), func(s *snapshot) float64 { return float64(s.total) }, prometheus.GaugeValue},
	}
	failures = prometheus.NewDesc("nv_inference_request_failure", "Number of failed inference requests, all batch sizes", append([]string{"reason"}, labels...), nil)
	copied   = prometheus.NewDesc("nereid_bytes_copied_total", "Bytes of tensors that the server itself copied: in, into the memory that a stub reads; out, into messages", append([]string{"direction"}, labels...), nil)
	restarts = prometheus.NewDesc("nereid_stub_restarts_total", "Stubs that ended and were started again", labels, nil)
	reasons  = []string{"BACKEND", "CANCELED", "OTHER", "REJECTED"}
)

func desc(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, labels, nil) }

type collector struct{ models *model.Manager }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range requests {
		ch <- m.desc
	}
	ch <- failures
	ch <- copied
	ch <- restarts
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	for _, v := range c.models.Versions("") {
		if state, _ := v.State(); state == model.Unavailable && v.Restarts() == 0 && v.Stats.Snapshot().Success.Count == 0 {
			continue // never served
		}
		version := strconv.FormatInt(v.Number, 10)
		s := &snapshot{Snapshot: v.Stats.Snapshot()}
		s.used, s.peak, s.total = v.Memory()
		for _, m := range requests {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(s), v.Name, version)
		}
		for _, reason := range reasons {
			ch <- prometheus.MustNewConstMetric(failures, prometheus.CounterValue, float64(s.FailureReasons[reason]), reason, v.Name, version)
		}
		ch <- prometheus.MustNewConstMetric(copied, prometheus.CounterValue, float64(v.Stats.CopiedIn.Load()), "in", v.Name, version)
		ch <- prometheus.MustNewConstMetric(copied, prometheus.CounterValue, float64(v.Stats.CopiedOut.Load()), "out", v.Name, version)
		ch <- prometheus.MustNewConstMetric(restarts, prometheus.CounterValue, float64(v.Restarts()), v.Name, version)
	}
}

// Endpoint serves /metrics.
type Endpoint struct{ http *http.Server }

// New makes the endpoint; Serve starts it.
func New(models *model.Manager) *Endpoint {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector{models})
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return &Endpoint{&http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}}
}

// Serve answers until Stop.
func (e *Endpoint) Serve(l net.Listener) error {
	if err := e.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Stop ends the listener, and after ctx every connection.
func (e *Endpoint) Stop(ctx context.Context) {
	if e.http.Shutdown(ctx) != nil {
		e.http.Close()
	}
}

// snapshot is the counters of one model version and what its input arena holds.
type snapshot struct {
	stats.Snapshot
	used, peak, total uint64
}
