# Every target that has a ## comment is listed by `make help`. CI and the README use these names and nothing else.

GO        ?= go
BIN       := build/bin
IMAGES    := build/images
LINT      := v2.15.0
FUZZTIME  ?= 30s
# How long the tests of one package may take; `make test TEST_TIMEOUT=1h` on a machine that is busy with other work.
TEST_TIMEOUT ?= 10m

# NVML is opened when the program runs. Where compilers bind all symbols at the start (Ubuntu's does), a program that is linked
# without this does not start on machines that have no such library.
LAZY      := -ldflags=-extldflags=-Wl,-z,lazy

# Go's binding of NVML calls functions that its header calls deprecated. Package stage/zygote, which has our C, asks for the warning again.
export CGO_CFLAGS := $(or $(CGO_CFLAGS),-O2 -g) -Wno-deprecated-declarations

.DEFAULT_GOAL := help
.PHONY: help tools fetch build images demo test test-python test-kill test-updates test-disk test-faults record check lint fmt fuzz bench bench-autoscaler bench-coldstart bench-gpu bench-keysmanager bench-hop bench-idle bench-sim bench-wake bench-cv train-cv paper-quart paper-bounds tune clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

tools: # name what is missing before anything long starts
	@scripts/tools

fetch: tools ## fetch ONNX Runtime and the models into build/
	@scripts/fetch

build: tools ## build the stagecoach binary into build/bin
	@mkdir -p $(BIN)
	@$(GO) build $(LAZY) -o $(BIN)/stagecoach ./cmd/stagecoach

images: fetch build ## build the functions' images into build/images
	@functions/images.sh $(IMAGES)

demo: images ## the main job on real input: OCR through three stages, a burst answered by forks, from zero and back
	@$(BIN)/stagecoach demo --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 --out build/demo

test: images ## what CI runs: every test with the race detector, against the real parts
	$(GO) vet ./...
	$(GO) test $(LAZY) -race -timeout $(TEST_TIMEOUT) ./...

test-python: images ## stages in Python: their own tests, and the Go tests that run them with real PyTorch
	@scripts/tools --torch
	scripts/test-python
	$(GO) test $(LAZY) -race -timeout $(TEST_TIMEOUT) ./internal/templatetest ./functions/torch/... ./stage/conformance ./keysmanager

test-kill: images ## 200 rounds of kill -9 of everything under async requests, and 1,000 OCR requests with a kill -9 every 2 s
	KILL_ROUNDS=$${KILL_ROUNDS:-200} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestKillAnywhere -v ./cmd/stagecoach
	KILL_REQUESTS=$${KILL_REQUESTS:-1000} KILL_EVERY=$${KILL_EVERY:-2s} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestKillAnyProcess -v ./cmd/stagecoach

test-updates: images ## 100 updates under 10,000 requests of all kinds; UPDATES and REQUESTS change that
	UPDATES=$${UPDATES:-100} REQUESTS=$${REQUESTS:-10000} $(GO) test $(LAZY) -count=1 -timeout 60m -run TestUpdatesUnderLoad -v ./cmd/stagecoach

test-disk: images ## the disk of the state folder is full, 100 times; DISK_ROUNDS changes that
	DISK_ROUNDS=$${DISK_ROUNDS:-100} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestFullDisk -v ./cmd/stagecoach

test-faults: images ## faults at their real length: NATS gone for 30 s
	NATS_OUTAGE=$${NATS_OUTAGE:-30s} $(GO) test $(LAZY) -count=1 -timeout 10m -run TestNATSOutage -v ./cmd/stagecoach

record: images ## decisions of a real run under a burst, which tests make again; anew when a policy changes on purpose
	STAGECOACH_RECORD=$(CURDIR)/autoscaler/testdata/record.jsonl CI=true $(GO) test $(LAZY) -count=1 -timeout 5m -run TestDecisionsOfARealRun -v ./cmd/stagecoach

check: fmt lint test ## format, lint, test: before each commit

fmt: ## fail when gofmt would change a file
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "gofmt would change:"; echo "$$out"; exit 1; fi

lint: ## golangci-lint with the rules and reasons of .golangci.yml
	@test -x $(BIN)/golangci-lint-$(LINT) || { mkdir -p $(BIN); GOBIN=$(CURDIR)/$(BIN) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT) && mv $(BIN)/golangci-lint $(BIN)/golangci-lint-$(LINT); }
	@$(BIN)/golangci-lint-$(LINT) run ./...

fuzz: images ## run every fuzz target for FUZZTIME (30s) each
	@GO="$(GO)" GOFLAGS="$$GOFLAGS $(LAZY)" FUZZTIME=$(FUZZTIME) scripts/fuzz

bench: bench-coldstart bench-keysmanager bench-hop bench-idle ## the benchmarks of the product; figures belong into docs/RESULTS.md

bench-autoscaler: images ## fixed, uniform and QUART's sizes on the same bursts; BENCH="--model minilm" for real compute
	@$(BIN)/stagecoach bench autoscaler --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 --svg build/autoscaler.svg $(BENCH)

bench-coldstart: images ## order to first output of a replica on every start path; BENCH=--full for 4 GB, and 32 replicas
	@$(BIN)/stagecoach bench coldstart --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 $(BENCH)

bench-gpu: build ## order to first output of stages in PyTorch on a GPU, which this machine needs to have
	@$(BIN)/stagecoach bench gpu $(BENCH)

bench-keysmanager: images ## forks a second, a thousand orders at once, an idle daemon, a request from zero
	@$(BIN)/stagecoach bench keysmanager --images $(IMAGES) --ort build/ort/libonnxruntime.so.1

bench-hop: images ## HTTP to replica and back, against a bare echo
	@$(BIN)/stagecoach bench hop --images $(IMAGES)

bench-sim: images ## the simulator against a running system: the same arrivals, stages that wait
	@$(BIN)/stagecoach bench sim --images $(IMAGES) $(BENCH)

paper-quart: build ## QUART against tuned opponents, simulated, into build/quart; PAPER="--quick" and more: docs/cli.md
	@$(BIN)/stagecoach sim paper quart --out build/quart $(PAPER)

paper-bounds: build ## where scaling stage by stage stops paying: the maps and tables of docs/when-it-pays.md anew; PAPER="--seeds 8" and more
	@$(BIN)/stagecoach sim paper bounds --out build/bounds $(PAPER)
	@mkdir -p docs/img && cp build/bounds/bounds-*.svg docs/img/ && sed 's|](bounds-|](img/bounds-|' build/bounds/report.md >docs/when-it-pays-numbers.md

tune: build ## the configurations of all contenders anew, which takes long; PAPER="--only /ours" for some
	@$(BIN)/stagecoach sim paper quart --tune --tuned sim/study/quart/tuned.json --out build/quart $(PAPER)

bench-cv: ## predictors of burstiness: how far off each is on simulations that were held back, and what it is worth
	@$(GO) run ./bench/cv

train-cv: ## the weights of the attention on burstiness, anew (sim/study/cv/weights.go), and what its parts are worth
	@$(GO) run ./bench/cv --train sim/study/cv/weights.go

bench-wake: images ## the first answer of the OCR pipeline at zero; BENCH="--against OTHER" for another build beside
	@$(BIN)/stagecoach bench wake --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 $(BENCH)

bench-idle: images ## what a thousand functions cost that nobody calls
	@$(BIN)/stagecoach bench idle --images $(IMAGES)

clean: ## remove build/
	rm -rf build
