# `make` alone lists all commands.
# Everything runs in .venv, installed from the hash-locked files in envs/ by one version of uv.

override SHELL := bash
override .SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

override BIN := .venv/bin
override PROGRAM := PYTHONPATH=scripts$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python
override TOOL = $(PROGRAM) -m vlmflow.tools
PYTHON ?= python3
FIRE ?=
DATASET ?= fire
RUN ?= qwen3vl-fire
ARGS ?=
FOLDER ?= runs/demo
NAMES ?=
STEP ?=
CONFIG ?=
NAMESPACE ?= vlmflow
ON ?= kubernetes
PORT ?=
TARGET ?=
FROM ?=
TO ?=
PICTURE ?=
ASK ?=
FEEDBACK ?=
SHAPE ?= 8b
MINUTES ?= 8
OUT ?=
CUDA ?= 13.0
# Only the command line says what is served, and makes a publication public or unasked: no variable of the environment.
ADAPTER :=
GPUS :=
PUBLIC :=
YES :=

# What a person writes is data: no shell and no make reads it. Recipes take it from the environment ("$$RUN"), and all
# other variables are fixed by `override`.
override GIVEN := PYTHON FIRE DATASET RUN ARGS FOLDER NAMES STEP CONFIG NAMESPACE ON PORT TARGET FROM TO PICTURE ASK \
  FEEDBACK SHAPE MINUTES OUT CUDA ADAPTER GPUS PUBLIC YES
$(foreach name,$(GIVEN),$(eval override export $(name) := $$(value $(name))))

$(foreach name,ADAPTER PUBLIC YES,$(if $(filter-out 1,$(value $(name))),$(error $(name) is 1, or is left out)))

# Makes a variable an array of its words, as a shell reads quotes; nothing in it runs: $(call split,ARGS); "$${ARGS[@]}"
override split = words="$$(xargs -r printf '%s\n' <<<"$$$(1)")"; readarray -t $(1) < <(printf '%s' "$$words")

# The words of ARGS behind the configuration's files, if there are any: $(configured); "$${ARGS[@]}". The files are read
# here first: Snakemake reads --configfile before the Snakefile, and says neither where nor in which file YAML is broken.
override configured = $(call split,ARGS); $(call split,CONFIG); \
  if [ -n "$${CONFIG[*]}" ]; then case " $${ARGS[*]}" in *" --configfile"*) \
    echo "make: CONFIG and --configfile in ARGS: name all files by CONFIG=\"FIRST SECOND\"" >&2; exit 2;; esac; \
    $(TOOL).check_config --only-yaml "$${CONFIG[@]}"; \
    ARGS=(--configfile "$${CONFIG[@]}" "$${ARGS[@]}"); fi

.PHONY: help env-track env-search demo fire-demo run estimate check-config check test test-all test-remote test-slow mutations test-cluster lint bench bench-cluster gpu-check gpu-pack pins docs lock refresh-pictures clean-runs board rows try serve verify publish track index notebook
.PHONY: doctor status cluster-token cluster-push cluster-run cluster-log cluster-stop cluster-get cluster-put

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

env-track: .venv-track/whole.stamp ## install what sends runs to MLflow, Weights & Biases and OpenTelemetry, in .venv-track
env-search: .venv-search/whole.stamp ## install what chooses the trials of a search, in .venv-search

lock: .venv/bin/uv ## resolve the environments again: data, train, dev and jupyter together, track and search each alone
	$(BIN)/uv lock
	for group in data train dev jupyter; do \
	  $(BIN)/uv export --quiet --frozen --only-group $$group --no-emit-index-url --no-header -o envs/$$group.lock; done
	for alone in track search; do \
	  $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-header envs/$$alone.in -o envs/$$alone.lock; done

# --- the pipeline -----------------------------------------------------------------------------------------------

override DEMO := $(BIN)/snakemake --profile profiles/demo
override PAGES := "reports/data-$$DATASET.html" "reports/lengths-$$RUN.html" "reports/run-$$RUN.html"
override GENERATOR := $(wildcard scripts/vlmflow/demo/*.py)

demo: .venv/train.stamp runs/demo/tiny-model/config.json ## the whole pipeline on a generated sample and a tiny model, on the CPU
	$(DEMO) --directory runs/demo "merged/$$RUN" $(PAGES)

runs/demo/sample/faults.json: scripts/vlmflow/tools/make_sample.py $(GENERATOR) | .venv/train.stamp
	@echo "The sample is damaged on purpose: the workflow finds, counts and rejects broken rows and pictures."
	$(TOOL).make_sample --folder runs/demo/sample
	@touch $@

runs/demo/tiny-model/config.json: runs/demo/sample/faults.json scripts/vlmflow/tools/make_tiny_model.py | .venv/train.stamp
	$(TOOL).make_tiny_model --folder runs/demo/tiny-model --text '[runs/demo/sample/FIRE-train-100K.json]'
	@touch $@

fire-demo: .venv/train.stamp ## the same on real FIRE rows: make fire-demo FIRE=FOLDER (FIRE-train-100K.json, FIRE-test.json, images/)
	@$(TOOL).make_fire_demo --fire "$$FIRE" --folder runs/fire-demo
	$(DEMO) --directory runs/fire-demo \
	  --configfile profiles/demo/run.yaml profiles/demo/real-rows.yaml runs/fire-demo/my-run.yaml -- "merged/$$RUN" $(PAGES)

run: .venv/train.stamp ## the whole pipeline on your rows, with its pages: make run CONFIG=my-run.yaml [TARGET=merged/my-run] [ARGS=-n]
	@test -n "$$CONFIG" || { echo 'say which: make run CONFIG=my-run.yaml' >&2; exit 2; }
	@$(configured); $(call split,TARGET); $(BIN)/snakemake "$${ARGS[@]}" -- "$${TARGET[@]}"

check-config: .venv/data.stamp ## check your configuration files: make check-config CONFIG=my-run.yaml
	@$(call split,CONFIG); $(TOOL).check_config "$${CONFIG[@]}"

estimate: .venv/train.stamp ## what a run needs, before it asks for a GPU: make estimate RUN=my-run CONFIG=my-run.yaml
	@$(configured); $(BIN)/snakemake "$${ARGS[@]}" -- "reports/estimate-$$RUN.html"

refresh-pictures: .venv/train.stamp ## use pictures added to the roots: make refresh-pictures DATASET=fire CONFIG=my-run.yaml
	@$(configured); $(BIN)/snakemake "$${ARGS[@]}" --forcerun resolve_images -- "data/$$DATASET/stats.json"

clean-runs: .venv/train.stamp ## list what finished runs no longer need, ask, delete it: make clean-runs CONFIG=my-run.yaml
	@$(configured); $(TOOL).clean_runs "$${ARGS[@]}"

board: .venv/train.stamp ## show TensorBoard over all trainings: make board ARGS="--directory runs/demo" [PORT=6006]
	@$(configured); $(TOOL).board $${PORT:+--port="$$PORT"} "$${ARGS[@]}"

index: .venv/data.stamp ## write reports/index.html, all runs on one page: make index ARGS="--directory runs/demo"
	@$(configured); $(TOOL).index_page "$${ARGS[@]}"

notebook: .venv/jupyter.stamp ## look at a run in JupyterLab, on this machine alone: make notebook FOLDER=runs/demo RUN=my-run
	@$(call split,ARGS); folder="$$(realpath -- "$$FOLDER")"; cd notebooks; VLMFLOW_FOLDER="$$folder" VLMFLOW_RUN="$$RUN" \
	  ../$(BIN)/jupyter lab $${PORT:+--port="$$PORT"} "$${ARGS[@]}" look.ipynb

rows: .venv/train.stamp ## show the rows of a step of a full training: make rows RUN=my-run STEP=1200 CONFIG=my-run.yaml
	@test -n "$$RUN" && test -n "$$STEP" || { echo 'say which: make rows RUN=my-run STEP=1200 CONFIG=my-run.yaml' >&2; exit 2; }
	@$(configured); $(TOOL).rows_of_step --run "$$RUN" --step "$$STEP" "$${ARGS[@]}"

try: .venv/train.stamp ## base and tuned side by side, then your feedback: make try RUN=my-run [PICTURE=cat.jpg ASK="…"] [ARGS="--directory …"]
	@$(configured); $(TOOL).try_run --run "$$RUN" $${PICTURE:+--picture="$$PICTURE"} \
	  $${ASK:+--ask="$$ASK"} $${FEEDBACK:+--feedback="$$FEEDBACK"} "$${ARGS[@]}"

serve: .venv/train.stamp ## serve a run's weights on this machine: make serve RUN=my-run [PORT=8000] [GPUS=2] [ADAPTER=1] [ARGS="--directory …"]
	@$(call split,ARGS); $(TOOL).serve --run "$$RUN" $${PORT:+--port="$$PORT"} \
	  $${GPUS:+--gpus="$$GPUS"} $(if $(filter 1,$(ADAPTER)),--what adapter) "$${ARGS[@]}"

verify: .venv/train.stamp ## check a run's digests from raw file to weights, and its tensors again: make verify RUN=my-run [ARGS="--directory …"]
	@$(call split,ARGS); $(TOOL).check_provenance --run "$$RUN" "$${ARGS[@]}"

track: .venv/data.stamp env-track ## send a finished run to trackers: make track RUN=my-run CONFIG=my-run.yaml, or ARGS="--mlflow …"
	@$(configured); $(TOOL).track_run --run "$$RUN" "$${ARGS[@]}"

publish: .venv/train.stamp ## send a run's verified weights to the hub: make publish RUN=my-run TO=OWNER/NAME [ADAPTER=1] [PUBLIC=1] [YES=1]
	@test -n "$$TO" || { echo 'say where: make publish RUN=my-run TO=OWNER/NAME' >&2; exit 2; }
	@$(call split,ARGS); $(TOOL).publish_run --run "$$RUN" --to "$$TO" \
	  $(if $(filter 1,$(ADAPTER)),--adapter) $(if $(filter 1,$(PUBLIC)),--public) $(if $(filter 1,$(YES)),--yes) \
	  "$${ARGS[@]}"

pins: .venv/train.stamp ## read revisions, sizes and digests from the hub into pins.yaml, for review
	$(TOOL).make_pins

# --- on Kubernetes: docs/kubernetes.md ------------------------------------------------------------------------------

override REMOTE := $(PROGRAM) -m vlmflow.remote
override CLUSTER := $(REMOTE).cluster.controller --namespace "$$NAMESPACE"

doctor: .venv/data.stamp ## check what the cluster has and lacks for the runs: make doctor [ON=slurm] ARGS="--json"
	@$(configured); case "$$ON" in kubernetes) $(REMOTE).kubernetes.doctor --namespace "$$NAMESPACE" "$${ARGS[@]}";; \
	  slurm) $(REMOTE).slurm.doctor "$${ARGS[@]}";; \
	  *) echo "make: ON is kubernetes or slurm" >&2; exit 2;; esac

status: .venv/data.stamp ## show what trains here and runs in Slurm or the cluster, with its progress or what it waits for
	@$(configured); $(TOOL).status $${NAMESPACE:+"$$NAMESPACE"} "$${ARGS[@]}"

cluster-token: .venv/data.stamp ## make the Secret with the hub's token from the line HF_TOKEN=… of .env
	@$(CLUSTER) token

cluster-push: .venv/data.stamp ## replace the controller's checkout by this one
	@$(CLUSTER) push

cluster-run: .venv/data.stamp ## push, and run there: make cluster-run TARGET=merged/my-run CONFIG="profiles/kubernetes/stores.yaml my-run.yaml"
	@TARGET="$${TARGET:-merged/$$RUN}"; $(call split,TARGET); $(configured); \
	  $(CLUSTER) run -- "$${ARGS[@]}" -- "$${TARGET[@]}"

cluster-get: .venv/data.stamp ## fetch a target, compared with its digests: make cluster-get TARGET=merged/RUN TO=FOLDER [FROM=s3://BUCKET]
	@TARGET="$${TARGET:-merged/$$RUN}"; TO="$${TO:-$$TARGET}"; if test -n "$$FROM"; \
	  then $(REMOTE).storage.s3_get "$${FROM%/}/$$TARGET" "$$TO"; else $(CLUSTER) get -- "$$TARGET" "$$TO"; fi

cluster-put: .venv/data.stamp ## copy files to the cluster: make cluster-put FROM=/data/pictures TO=/cache/image-roots/mine
	@$(CLUSTER) put -- "$$FROM" "$$TO"

cluster-log: .venv/data.stamp ## follow the run in the controller
	@$(CLUSTER) log

cluster-stop: .venv/data.stamp ## stop the run in the controller; trainers save a checkpoint first
	@$(CLUSTER) stop

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
