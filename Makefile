# `make help` lists every target that has a ## comment. CI and the README use only these names.

GO        ?= go
BIN       := build/bin
IMAGES    := build/images
GPU       ?= build/gpu
LINT      := v2.15.0
DEADCODE  := v0.52.0
# What functions run in: process or containerd. With containerd, demo and bench-coldstart start one
# of their own.
RUNTIME   ?= process
BESIDE    := $(if $(filter containerd,$(RUNTIME)),scripts/with-containerd)
LINTERS   := $(BIN)/golangci-lint-$(LINT) $(BIN)/deadcode-$(DEADCODE)
FUZZTIME  ?= 30s
# How long the tests of one package may take. Use `make test TEST_TIMEOUT=1h` on a busy machine.
TEST_TIMEOUT ?= 40m

# NVML is opened when the program runs. Some compilers, such as Ubuntu's, make programs bind all
# symbols at their start. Without this flag, such a program does not start where NVML is missing.
LAZY      := -ldflags=-extldflags=-Wl,-z,lazy

# Programs of tests have no DWARF, which saves a fifth of the time to link them. Vet is one of the
# linters of make lint.
TESTS     := -vet=off '-ldflags=-w -extldflags=-Wl,-z,lazy'

# Go's binding of NVML calls functions that NVML's header calls deprecated. Package stage/zygote,
# which has our C code, turns the warning on again.
export CGO_CFLAGS := $(or $(CGO_CFLAGS),-O2 -g) -Wno-deprecated-declarations

.DEFAULT_GOAL := help
.PHONY: help tools fetch build images images-oci images-push demo test test-python test-solvers test-torch test-kill test-updates test-variants test-disk test-faults test-upgrade test-split test-cluster test-containerd test-images-oci kubernetes test-kubernetes bench-kubernetes record record-cpu check lint fmt fuzz bench bench-autoscaler bench-coldstart bench-gpu bench-gpu-bundle bench-keysmanager bench-hop bench-idle bench-images bench-sim bench-wake bench-cv bench-waits bench-rates bench-price bench-scale train-cv paper-quart paper-quart-full paper-bounds tune clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

tools: # name what is missing before anything long starts
	@scripts/tools

fetch: tools ## fetch ONNX Runtime and the models into build/
	@scripts/fetch

build: tools ## build the stagecoach binary into build/bin
	@mkdir -p $(BIN)
	@$(GO) build $(LAZY) -o $(BIN)/stagecoach ./cmd/stagecoach
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags="-s -w" -o $(BIN)/stagecoach-init ./cmd/stagecoach-init

images: fetch build ## build the functions' images into build/images
	@functions/images.sh $(IMAGES)

images-oci: fetch ## OCI images of Stagecoach itself, reproducible, without Docker, in build/oci
	@$(GO) run ./scripts/oci build

images-push: ## push the images of images-oci to REGISTRY=host:port/path; TAG names another tag
	@test -n "$(REGISTRY)" || { echo "want REGISTRY=host:port/path" >&2; exit 2; }
	@$(GO) run ./scripts/oci push $(if $(TAG),--tag $(TAG)) $(REGISTRY)

test-images-oci: images images-oci ## build OCI images again and compare; push, pull and run them
	@$(GO) run ./scripts/oci check
	STAGECOACH_OCI=$(CURDIR)/build/oci $(GO) test $(TESTS) -count=1 -timeout 10m -run 'TestImagesRun$$' -v ./scripts/oci

demo: images ## OCR through three stages on real input, then a burst answered by forks
	@$(BESIDE) $(BIN)/stagecoach demo --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 --out build/demo --runtime $(RUNTIME)

test: images ## what CI runs: every test with the race detector, against the real parts
	$(GO) test $(TESTS) -race -timeout $(TEST_TIMEOUT) ./...
	cd scripts/chart && $(GO) test -vet=off ./...

test-python: images ## test stages in Python, also with real PyTorch
	@scripts/tools --torch
	scripts/test-python
	$(GO) test $(TESTS) -race -timeout $(TEST_TIMEOUT) ./internal/templatetest ./functions/torch/... ./stage/conformance ./keysmanager

test-solvers: ## compare plans of variants with HiGHS, 500 problems; SOLVER_PROBLEMS changes that
	GO="$(GO)" scripts/test-solvers

test-torch: images ## stages on PyPI's PyTorch and popular models; scripts/test-torch has options
	GO="$(GO)" TEST_TIMEOUT=$(TEST_TIMEOUT) scripts/test-torch

test-kill: images ## kill -9 of every process under async and OCR requests, at length
	KILL_ROUNDS=$${KILL_ROUNDS:-200} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestKillAnywhere -v ./cmd/stagecoach
	KILL_REQUESTS=$${KILL_REQUESTS:-1000} KILL_EVERY=$${KILL_EVERY:-2s} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestKillAnyProcess -v ./cmd/stagecoach

test-updates: images ## 100 updates under 10,000 requests; UPDATES and REQUESTS change that
	UPDATES=$${UPDATES:-100} REQUESTS=$${REQUESTS:-10000} $(GO) test $(LAZY) -count=1 -timeout 60m -run TestUpdatesUnderLoad -v ./cmd/stagecoach

test-variants: images ## 100 faults of a stage with variants under load; VARIANT_ROUNDS changes that
	VARIANT_ROUNDS=$${VARIANT_ROUNDS:-100} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestVariantsUnderFaults -v ./cmd/stagecoach

test-disk: images ## the disk of the state folder is full, 100 times; DISK_ROUNDS changes that
	DISK_ROUNDS=$${DISK_ROUNDS:-100} $(GO) test $(LAZY) -count=1 -timeout 30m -run TestFullDisk -v ./cmd/stagecoach

test-faults: images ## faults at their real length: NATS gone for 30 s
	NATS_OUTAGE=$${NATS_OUTAGE:-30s} $(GO) test $(LAZY) -count=1 -timeout 10m -run TestNATSOutage -v ./cmd/stagecoach

test-upgrade: images ## a cluster goes from the previous version to this one and back, under load
	GO="$(GO)" TEST_TIMEOUT=$(TEST_TIMEOUT) scripts/test-upgrade $(if $(RECORD),--record)

test-split: images ## 50 partitions of a cluster, at random; SPLIT_ROUNDS, _SEED, _ONLY; needs root
	CI=true SPLIT_ROUNDS=$${SPLIT_ROUNDS:-50} $(GO) test $(LAZY) -count=1 -timeout 60m -run 'TestPartitions$$' -v ./cmd/stagecoach

test-cluster: images ## all of docs/howto-cluster.md on four network namespaces; needs root
	CI=true CLUSTER_TEST=full $(GO) test $(LAZY) -count=1 -timeout 10m -run 'TestHowtoCluster$$' -v ./cmd/stagecoach

test-containerd: images ## containers, with two versions of containerd; 50 cycles, 50 kills
	@scripts/tools --containerd
	GO="$(GO)" TEST_TIMEOUT=$(TEST_TIMEOUT) scripts/test-containerd
	CI=true CYCLES=$${CYCLES:-50} $(GO) test $(LAZY) -count=1 -timeout 10m -run TestCyclesLeaveNothing -v ./cmd/stagecoach
	CI=true KILL_ROUNDS=$${KILL_ROUNDS:-50} $(GO) test $(LAZY) -count=1 -timeout 10m -run 'TestKillAnyContainerProcess|TestKillAnywhere/containerd' -v ./cmd/stagecoach

kubernetes: ## build Kubernetes for tests, once per version, outside of this folder
	@GO="$(GO)" scripts/kubernetes/build

test-kubernetes: kubernetes images images-oci ## the chart on a real Kubernetes; needs root
	@scripts/tools --containerd --kubernetes
	CI=true STAGECOACH_KUBERNETES_TEST=1 $(GO) test $(LAZY) -count=1 -timeout 20m -v ./internal/kubetest

bench-kubernetes: kubernetes images images-oci ## compare where functions run; needs root
	@scripts/tools --containerd --kubernetes
	CI=true STAGECOACH_KUBERNETES_TEST=1 STAGECOACH_KUBERNETES_BENCH=1 $(GO) test $(LAZY) -count=1 -timeout 20m -run TestDesigns -v ./internal/kubetest

record: images ## record decisions for the replay tests again, after a change of a policy
	STAGECOACH_RECORD=$(CURDIR)/autoscaler/testdata/record.jsonl CI=true $(GO) test $(LAZY) -count=1 -timeout 5m -run TestDecisionsOfARealRun -v ./cmd/stagecoach

record-cpu: images ## record a live run in which a stage gets CPU; needs root and idle cores
	@$(GO) run ./scripts/cpu-compensation --keep autoscaler/testdata/cpu-live.jsonl.gz $(BENCH)

check: fmt lint test ## format, lint, test: run it before each commit

fmt: ## fail when gofmt would change a file
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "gofmt would change:"; echo "$$out"; exit 1; fi

lint: $(LINTERS) ## English of comments and documents, linters, functions that nothing calls
	@$(GO) run ./scripts/english
	@GOLANGCI_LINT_CACHE=$(CURDIR)/build/lint $(BIN)/golangci-lint-$(LINT) run --allow-parallel-runners ./...
	@scripts/deadcode $(BIN)/deadcode-$(DEADCODE)

$(BIN)/golangci-lint-$(LINT):
	@mkdir -p $(BIN)
	@GOBIN=$(CURDIR)/$(BIN) CGO_ENABLED=0 $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT)
	@mv $(BIN)/golangci-lint $@

$(BIN)/deadcode-$(DEADCODE):
	@mkdir -p $(BIN)
	@GOBIN=$(CURDIR)/$(BIN) CGO_ENABLED=0 $(GO) install golang.org/x/tools/cmd/deadcode@$(DEADCODE)
	@mv $(BIN)/deadcode $@

fuzz: images ## run every fuzz target for FUZZTIME (30s) each
	@GO="$(GO)" GOFLAGS="$$GOFLAGS $(LAZY)" FUZZTIME=$(FUZZTIME) scripts/fuzz

bench: bench-coldstart bench-keysmanager bench-hop bench-idle ## main benchmarks

bench-autoscaler: images ## fixed, uniform and QUART's sizes; BENCH="--model minilm" for compute
	@$(BIN)/stagecoach bench autoscaler --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 --svg build/autoscaler.svg $(BENCH)

bench-coldstart: images ## order to first output on every start path; BENCH=--full for 4 GB
	@$(BESIDE) $(BIN)/stagecoach bench coldstart --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 --runtime $(RUNTIME) $(BENCH)

bench-gpu: build ## order to first output of PyTorch stages; needs a GPU; BENCH="--size 5.4GB"
	@$(BIN)/stagecoach bench gpu $(BENCH)

bench-gpu-bundle: tools ## a compressed binary in build/gpu, for another machine: docs/RESULTS.md
	@mkdir -p $(GPU)
	@$(GO) build -trimpath -tags noevaluation "-ldflags=-s -w -extldflags=-Wl,-z,lazy" -o $(GPU)/stagecoach ./cmd/stagecoach
	@gzip -f $(GPU)/stagecoach

bench-keysmanager: images ## forks per second, 1,000 orders at once, an idle daemon, from zero
	@$(BIN)/stagecoach bench keysmanager --images $(IMAGES) --ort build/ort/libonnxruntime.so.1

bench-hop: images ## HTTP to replica and back, against a bare echo
	@$(BIN)/stagecoach bench hop --images $(IMAGES)

bench-sim: images ## the simulator against a running system: the same arrivals, stages that wait
	@$(BIN)/stagecoach bench sim --images $(IMAGES) $(BENCH)

paper-quart: build ## QUART against tuned opponents: docs/quart-report.md and its figures
	@$(BIN)/stagecoach sim paper quart --out build/quart $(PAPER)
	@mkdir -p docs/img && cp build/quart/quart-*.svg docs/img/ && sed 's|](quart-|](img/quart-|' build/quart/report.md >docs/quart-report.md

paper-quart-full: build ## all loads and sweeps; goes on where it was stopped
	@$(BIN)/stagecoach sim paper quart --full --out build/quart-full $(PAPER)
	@mkdir -p docs/img/full && cp build/quart-full/quart-*.svg docs/img/full/ && sed 's|](quart-|](img/full/quart-|' build/quart-full/report.md >docs/quart-report-full.md

paper-bounds: build ## maps and tables of docs/when-it-pays.md; PAPER="--seeds 8" and more
	@$(BIN)/stagecoach sim paper bounds --out build/bounds $(PAPER)
	@mkdir -p docs/img && cp build/bounds/bounds-*.svg docs/img/ && sed 's|](bounds-|](img/bounds-|' build/bounds/report.md >docs/when-it-pays-numbers.md

tune: build ## tune all contenders again; PAPER="--only /ours" for some, --full for all loads
	@$(BIN)/stagecoach sim paper quart --tune --tuned sim/study/quart/tuned.json --out build/quart $(PAPER)

bench-cv: ## predictors of burstiness: errors on held-back simulations, and their worth
	@$(GO) run ./sim/study/cv/compare

bench-waits: ## predicted waits against simulated queues: the tables of docs/model.md
	@$(GO) run ./sim/study/waits --json docs/model.json $(BENCH)

bench-rates: ## measured rates after steps, ramps and spikes: the tables of docs/rates.md
	@$(GO) run ./sim/study/rates --json docs/rates.json $(BENCH)

bench-price: ## what a price of latency buys: the table and the curve of docs/autoscaler.md
	@$(GO) run ./sim/study/price --svg docs/img/price.svg $(BENCH)

train-cv: ## train the weights of the attention on burstiness (sim/study/cv/weights.go)
	@$(GO) run ./sim/study/cv/compare --train sim/study/cv/weights.go

bench-wake: images ## first answer of the OCR pipeline at zero; BENCH="--against BUILD"
	@$(BIN)/stagecoach bench wake --images $(IMAGES) --ort build/ort/libonnxruntime.so.1 $(BENCH)

bench-images: ## a node's fetch of an image of 1 GiB over TLS, beside bare TLS; IMAGE_MIB, TMPDIR
	@$(GO) test $(LAZY) -run xxx -bench Fetch -benchtime $${COUNT:-5}x ./image/transfer

bench-idle: images ## the cost of a thousand functions that nobody calls
	@$(BIN)/stagecoach bench idle --images $(IMAGES)

bench-scale: build ## decisions about 1,000 nodes, and 1,000 nodes without processes
	@$(BIN)/stagecoach bench scale --svg docs/img/scale.svg $(BENCH)
	@$(BIN)/stagecoach bench nodes-scale

clean: ## remove build/
	rm -rf build
