# `make serve` and `make test` need Go and Python 3 (with venv); they fetch the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

GO ?= go
PYTHON ?= python3
BUILD := .build
VENV := $(BUILD)/venv
SHARED ?= ../shared
SERVER_CMD := $(CURDIR)/bin/nereid serve --model-repository={repo} --http-port={http} --grpc-port={grpc} --metrics-port={metrics}
# The race detector needs a C compiler; where there is none the tests run without it.
RACE := $(if $(shell command -v cc),-race,)

.PHONY: build serve test check race lint generate generated venv pytest conformance fuzz bench bench-triton clean

build: ## the server and the example backends, into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ ./cmd/nereid
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/nereid-backend-identity ./examples/identity
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/nereid-backend-python-like ./examples/python-like

serve: build $(VENV)/.numpy ## serve the examples; prints the addresses and a first request
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bin/nereid serve --model-repository=examples/identity/models --model-repository=examples/python-like/models

test: check pytest ## everything that must pass before a change lands

check: lint generated race ## formatting, vet, staticcheck, import rules, generated code, race tests

lint: $(BUILD)/staticcheck
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$unformatted" ]; then echo "not gofmt-ed: $$unformatted"; exit 1; fi
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) build ./...
	$(BUILD)/staticcheck ./...

race: venv
	@[ -n "$(RACE)" ] || echo "no C compiler: the tests run without the race detector"
	$(GO) test $(RACE) ./...

# The Python side: the stub's own modules, and the published client against a real server.
pytest: build venv
	$(VENV)/bin/pytest -q tests

generate: ## regenerate the Go code of proto/ and the frame vectors
	cd tools && $(GO) run ./protogen ../proto
	$(GO) test ./internal/wire -run TestVectors -update

generated:
	@rm -rf $(BUILD)/proto && mkdir -p $(BUILD) && cp -r proto $(BUILD)/proto
	cd tools && $(GO) run ./protogen ../$(BUILD)/proto
	@diff -r proto $(BUILD)/proto || { echo "generated code is stale: run make generate"; exit 1; }

conformance: build venv ## the conformance suite, as far as this server goes
	$(VENV)/bin/pip install -q -r $(SHARED)/conformance/requirements.txt
	cd $(SHARED)/conformance && PYTHONDONTWRITEBYTECODE=1 PATH="$(CURDIR)/$(VENV)/bin:$$PATH" pytest -q --server-cmd "$(SERVER_CMD) {extra}" \
	  --leave-out "ensemble*,seq_*,repeat,gauge,bls" -k "not ensemble and not seq_direct and not repeat" \
	  test_health_metadata.py test_infer.py test_dtypes.py test_malformed.py test_config_statistics.py test_system_shm.py

FUZZTIME ?= 20s
fuzz: ## each fuzz target for FUZZTIME
	@for target in $$(grep -rlE '^func Fuzz' --include=*_test.go . | xargs -n1 dirname | sort -u); do \
	  for f in $$(grep -hoE '^func Fuzz\w+' $$target/*_test.go | cut -d' ' -f2); do \
	    echo "== $$target $$f"; $(GO) test $$target -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME); done; done

bench: build venv ## our benchmarks: time, allocations, bytes copied
	$(GO) test -run '^$$' -bench . -benchmem ./internal/... ./host/...

bench-triton: build venv ## side by side with the real Triton; BENCH adds flags of compare.py
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(SHARED)/bench/compare.py --out $(BUILD)/bench --under-test "$(SERVER_CMD) --model-control-mode=explicit --load-model=*" $(BENCH)

clean:
	rm -rf bin $(BUILD)

# --- what the above fetch ---

$(VENV)/bin/pip:
	@mkdir -p $(BUILD)
	@$(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made: install Python 3.9 or newer with venv (Debian: python3-venv)"; exit 1; }

$(VENV)/.numpy: | $(VENV)/bin/pip
	$(VENV)/bin/pip install -q numpy
	@touch $@

venv: $(VENV)/.test
$(VENV)/.test: tests/requirements.txt $(VENV)/.numpy
	$(VENV)/bin/pip install -q -r tests/requirements.txt
	@touch $@

$(BUILD)/staticcheck: tools/go.mod
	@mkdir -p $(BUILD)
	cd tools && $(GO) build -o ../$@ honnef.co/go/tools/cmd/staticcheck
