# `make` alone lists all commands.
# Everything runs in .venv, installed from the hash-locked files in envs/ by one version of uv.

override SHELL := bash
override .SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

override BIN := .venv/bin
override TOOL = PYTHONPATH=scripts $(BIN)/python -m vlmflow.tools
PYTHON ?= python3
FIRE ?=
ARGS ?=
NAMES ?=
SHAPE ?= 8b
MINUTES ?= 8
OUT ?=
CUDA ?= 13.0

# What a person writes is data: no shell and no make reads it. Recipes take it from the environment ("$$FIRE"), and all
# other variables are fixed by `override`.
override GIVEN := PYTHON FIRE ARGS NAMES SHAPE MINUTES OUT CUDA
$(foreach name,$(GIVEN),$(eval override export $(name) := $$(value $(name))))

# Makes a variable an array of its words, as a shell reads quotes; nothing in it runs: $(call split,ARGS); "$${ARGS[@]}"
override split = words="$$(xargs -r printf '%s\n' <<<"$$$(1)")"; readarray -t $(1) < <(printf '%s' "$$words")

.PHONY: help env env-track env-search demo fire-demo check test test-all test-remote test-slow mutations test-cluster lint bench bench-cluster gpu-check gpu-pack docs lock

help: ## list all commands
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

# --- environments ---------------------------------------------------------------------------------------------

.venv/bin/uv: envs/uv.lock
	@command -v "$$PYTHON" >/dev/null || { echo "make: $$PYTHON is missing: apt install python3, or make PYTHON=…"; exit 1; }
	@"$$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	  { echo "make: $$PYTHON is $$("$$PYTHON" --version 2>&1); 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.12 …"; exit 1; }
	@"$$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $$PYTHON cannot make environments: apt install python3-venv"; exit 1; }
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "make: the locked packages are for Linux on x86-64"; exit 1; }
	@command -v git >/dev/null || { echo "make: git is missing: apt install git"; exit 1; }
	"$$PYTHON" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r envs/uv.lock
	@touch $@

override SITE_PACKAGES := $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.venv/%.stamp: envs/%.lock envs/quick_plugins.py envs/quick_plugins.pth .venv/bin/uv
	@echo "installing envs/$*.lock into .venv (some minutes the first time$(if $(filter data jupyter,$*),,, and 6 GB on disk))"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --compile-bytecode -r $<
	@cp envs/quick_plugins.py envs/quick_plugins.pth "$$($(SITE_PACKAGES))"
	@touch $@

# What needs packages of its own: each environment is resolved alone, and starts as a program of its own.
.venv-%/whole.stamp: envs/%.lock .venv/bin/uv
	@echo "installing envs/$*.lock into .venv-$* (a minute the first time)"
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-$*
	$(BIN)/uv pip install --quiet --python .venv-$*/bin/python --require-hashes --compile-bytecode -r $<
	@touch $@

env: .venv/train.stamp .venv/command.stamp ## install all of it, and the command `vlmflow`, in .venv
.venv/command.stamp: .venv/data.stamp envs/build.lock pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --build-constraints envs/build.lock --editable .
	@touch $@

env-track: .venv-track/whole.stamp ## install what sends runs to MLflow, Weights & Biases and OpenTelemetry, in .venv-track
env-search: .venv-search/whole.stamp ## install what chooses the trials of a search, in .venv-search

lock: .venv/bin/uv ## resolve the environments again: data, train, dev and jupyter together, track and search each alone
	$(BIN)/uv lock
	for group in data train dev jupyter; do \
	  $(BIN)/uv export --quiet --frozen --only-group $$group --no-emit-index-url --no-header -o envs/$$group.lock; done
	for alone in track search; do \
	  $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-header envs/$$alone.in -o envs/$$alone.lock; done
	echo hatchling | $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header - -o envs/build.lock

# --- the pipeline -----------------------------------------------------------------------------------------------

demo: env ## the whole pipeline on a generated sample and a tiny model, on the CPU
	@$(BIN)/vlmflow demo

fire-demo: env ## the same on real FIRE rows: make fire-demo FIRE=FOLDER (FIRE-train-100K.json, FIRE-test.json, images/)
	@$(TOOL).begin_folder --fire "$$FIRE" --folder runs/fire-demo
	@$(BIN)/vlmflow run profiles/demo/run.yaml --also profiles/demo/real-rows.yaml --also runs/fire-demo/my-run.yaml \
	  merged/qwen3vl-fire reports/data-fire.html reports/lengths-qwen3vl-fire.html reports/run-qwen3vl-fire.html \
	  --directory runs/fire-demo

# What `vlmflow` does now, by its former name here.
override FORMER := run:run%FILE check-config:check%FILE estimate:estimate%FILE board:board index:index try:try \
  refresh-pictures:refresh-pictures%FILE%DATASET clean-runs:clean notebook:notebook rows:rows%--step%N serve:serve \
  verify:verify track:track publish:publish%--to%OWNER/NAME pins:pins doctor:doctor status:status \
  cluster-run:cluster%run%FILE cluster-get:cluster%get%TARGET cluster-put:cluster%put%SOURCE%TO \
  $(foreach name,push log stop token,cluster-$(name):cluster%$(name))
override NAMES_BEFORE := $(foreach pair,$(FORMER),$(firstword $(subst :, ,$(pair))))
.PHONY: $(NAMES_BEFORE)
$(NAMES_BEFORE):
	@echo "make $@ is now: $(subst %, ,vlmflow $(patsubst $@:%,%,$(filter $@:%,$(FORMER)))) (vlmflow --help)" >&2; exit 2

# --- for development ---------------------------------------------------------------------------------------------

check: .venv/dev.stamp env-track env-search ## lint, and the unit tests that import neither torch nor scripts/vlmflow/remote: run it while you work
	$(BIN)/python tests/run.py check

test: .venv/dev.stamp env-track env-search ## lint, and all tests except those on a cluster and the slow ones
	$(BIN)/python tests/run.py test

test-remote: .venv/dev.stamp ## the unit tests of scripts/vlmflow/remote
	$(BIN)/python tests/run.py remote

test-slow: .venv/dev.stamp env-track env-search ## before a release: every kill, every order of writers, more examples for each property; Slurm's faults and operators on a cluster; all mutations; bench
	PYTHONPATH=tests/helpers $(BIN)/python -m pytest -p models_page --ignore tests/remote/cluster --ignore tests/remote/slurm -m "slow or hypothesis" --hypothesis-profile deep --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 40
	$(BIN)/python -m pytest tests/remote/slurm tests/remote/cluster -m slow --durations 25
	$(BIN)/python tests/mutations/run.py
	$(BIN)/python tests/bench/bench.py

mutations: .venv/dev.stamp env-track env-search ## break the code in the places of tests/mutations; a test must notice each: make mutations [NAMES="NAME …"]
	@$(call split,NAMES); $(BIN)/python tests/mutations/run.py "$${NAMES[@]}"

test-cluster: .venv/dev.stamp ## the tests on a real Slurm and a real Kubernetes of their own (Debian, root), or on that of KUBECONFIG
	$(BIN)/python tests/run.py cluster

test-all: test test-cluster ## the tests on a cluster too

lint: .venv/dev.stamp ## ruff, snakefmt, mypy and snakemake --lint only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/mypy --cache-dir "$${XDG_CACHE_HOME:-$$HOME/.cache}/vlmflow/mypy"
	$(BIN)/snakemake --lint

docs: .venv/dev.stamp ## write the pages of docs/ that are generated from the code
	$(TOOL).make_docs

bench: .venv/dev.stamp ## measure the figures of docs/benchmarks.md, side by side
	$(BIN)/python tests/bench/bench.py

bench-cluster: .venv/dev.stamp ## measure what a pod costs, on the tests' cluster
	$(BIN)/python tests/bench/bench_cluster.py

gpu-check: ## the workflow on this machine's GPU and PyTorch, measured: make gpu-check [MINUTES=8] [SHAPE=8b|2b|tiny] [OUT=FOLDER] [PYTHON=…]
	@$(call split,ARGS); "$$PYTHON" tests/gpu/gpu_check.py --shape="$$SHAPE" --minutes="$$MINUTES" \
	  $${OUT:+--out="$$OUT"} "$${ARGS[@]}"

gpu-pack: .venv/bin/uv ## what a machine without network lacks for gpu-check, as one archive: make gpu-pack [OUT=FILE] [CUDA=13.0]
	@$(BIN)/python tests/gpu/pack.py --cuda="$$CUDA" $${OUT:+--out="$$OUT"}
