# Every target makes the environment that it needs. PYTHON names the interpreter to make it from (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
# Measurements of others, which are no part of the repository.
DATA ?= ../shared/data
# A Python with DeepSpeed 0.19.8 and its autotuning extra; where there is none, that comparison is left out.
DEEPSPEED_PYTHON ?= $(VENV)/bin/python
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The environment with the frameworks of others: what is exported to, and what brings its own models and engines.
EXTRAS_VENV ?= .venv-extras
EXTRAS_BIN := $(EXTRAS_VENV)/bin
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed

# The environment with the oldest torch that pyproject.toml allows.
OLDEST_VENV ?= .venv-oldest
OLDEST_BIN := $(OLDEST_VENV)/bin
OLDEST_STAMP := $(OLDEST_VENV)/.installed

# Compiled modules are kept, wherever that is switched off: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

LOCKED := --quiet --disable-pip-version-check --require-hashes -r locks/development.txt
UV ?= uv

DOCS_VENV ?= .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
DOCS_STAMP := $(DOCS_VENV)/.installed

RELEASE_VENV ?= .venv-release
RELEASE_BIN := $(RELEASE_VENV)/bin
RELEASE_STAMP := $(RELEASE_VENV)/.installed

.PHONY: client release docs notebooks lock demo check lint test prove nightly oldest extras trackers gpu gpu-bundle gpu-ahead parity chaos hostile fuzz bench validate search clean

# Only files whose hashes are listed are installed. torch for CPUs where one is offered whose hash is listed, else the CUDA build.
$(STAMP): pyproject.toml constraints.txt $(wildcard locks/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(LOCKED) -r locks/torch-cpu.txt 2>/dev/null \
	    || $(BIN)/python -m pip install $(LOCKED) -r locks/torch-cuda.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q api autotune benchmarks executor search_spaces storage
	touch $@

# Needs uv, and the network. CPU_WHEELS: wheels of torch for CPUs, whose hashes are listed.
lock:
	$(PYTHON) -m locks.lock --uv $(UV) $(addprefix --cpu-wheel ,$(CPU_WHEELS))

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# docs/architecture.md lists what check, test and nightly cover. Three processes: with two a quarter of the time of two cores was waiting,
# and four were not faster.
# Plug-ins of other packages that no test here uses would cost each process a second.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
    -p no:schemathesis -p no:anyio -p no:platformdirs
# Tests that start no process and play no whole sweep.
CHECKED := tests/search_spaces $(addprefix tests/autotune/,frameworks objective prediction/cases prediction/equations \
    prediction/fitting request text)

check: lint
	$(PYTEST) -m "not nightly and not prove" $(CHECKED) --ignore tests/autotune/frameworks/test_launch.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP)
	$(PYTEST) -m "not nightly and not hostile and not prove"

prove: $(STAMP)
	$(PYTEST) -m "(prove or hypothesis) and not nightly and not hostile" --hypothesis-profile large

nightly: $(STAMP) $(RELEASE_STAMP)
	$(PYTEST) -m "nightly and not chaos and not fuzz"
	AUTOTUNE_STALL_SECONDS=0.05 $(BIN)/python -m pytest tests/api -m "not nightly and not fuzz"
	AUTOTUNE_FUZZ_EXAMPLES=5 $(BIN)/python -m pytest -m fuzz
	$(MAKE) notebooks NOTEBOOK_OUTPUTS=
	$(MAKE) oldest OLDEST_MARKS=
	$(MAKE) chaos hostile

# Of PyPI's torch, which is the CUDA build: it computes on CPUs as well.
$(OLDEST_STAMP): locks/torch-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r locks/torch-oldest.txt
	touch $@

# What depends on the version of torch: the engines, a sample of the parity matrix among their tests, the memory account, and
# the way through the proofs that need a GPU (but for the sweep, which needs the command line's packages).
# `make nightly` runs the whole matrices too.
OLDEST_MARKS ?= not nightly
oldest: $(OLDEST_STAMP)
	$(OLDEST_BIN)/python -m pytest -m "$(OLDEST_MARKS)" --numprocesses 3 --dist loadfile --no-loadscope-reorder --junitxml $(OLDEST_VENV)/engines.xml \
	    --ignore tests/executor/engines/deepspeed --ignore tests/executor/engines/command \
	    tests/executor/engines tests/executor/parallel tests/executor/measurement/test_memory.py
	rm -f $(OLDEST_VENV)/gpu.jsonl
	for part in correctness grid by-hand; do $(OLDEST_BIN)/python -m benchmarks.gpu --device cpu --part $$part --out $(OLDEST_VENV)/gpu.jsonl \
	    --resume $(OLDEST_VENV)/gpu.jsonl --seconds 520 || exit 1; done
	$(OLDEST_BIN)/python -m benchmarks.engines.torch_versions --results $(OLDEST_VENV)/engines.xml --markdown docs/results/torch-versions.md

# From constraints.txt: the frameworks of others are no part of what is locked.
# torch first, with its exact version: without it, installers may prefer a newer build with gigabytes of CUDA libraries.
# torchtitan by itself: it asks for a version of datasets that refuses the fsspec of the others.
$(EXTRAS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EXTRAS_VENV)
	$(EXTRAS_BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(EXTRAS_BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,exports,transformers,deepspeed,mcp,ray-node]' helm-python-sdk smac -c constraints.txt
	$(EXTRAS_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^torchtitan==' constraints.txt)"
	touch $@

# Every tracker with its library, and a server of MLflow, which refuses the versions of four packages that everything else is tested
# with; these are the versions that it is tested with.
TRACKERS_VENV ?= .venv-trackers
TRACKERS_BIN := $(TRACKERS_VENV)/bin
TRACKERS_STAMP := $(TRACKERS_VENV)/.installed
TRACKERS_NEED := graphql-core==3.2.14 importlib_metadata==9.1.0 pyarrow==25.0.1 python-dateutil==2.9.0.post0

$(TRACKERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRACKERS_VENV)
	grep -vE "^($$(echo '$(TRACKERS_NEED)' | sed -E 's/==[^ ]*//g; s/ /|/g'))==" constraints.txt > $(TRACKERS_VENV)/constraints.txt
	$(TRACKERS_BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" $(TRACKERS_NEED) \
	    -c $(TRACKERS_VENV)/constraints.txt
	$(TRACKERS_BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[wandb,mlflow,tensorboard]' mlflow pytest pytest-xdist hypothesis \
	    $(TRACKERS_NEED) -c $(TRACKERS_VENV)/constraints.txt
	touch $@

trackers: $(TRACKERS_STAMP)
	$(TRACKERS_BIN)/python -m pytest tests/autotune/trackers

# Every test that skips where a framework of others is missing, and the proofs that need them.
extras: $(EXTRAS_STAMP) trackers
	$(EXTRAS_BIN)/python -m pytest tests/autotune/frameworks/test_targets.py tests/autotune/strategies \
	    tests/autotune/test_agents.py tests/search_spaces/models tests/executor/files tests/executor/engines/test_user_modules.py tests/executor/engines/command/test_frameworks.py tests/executor/engines/deepspeed tests/autotune/inside/test_libraries.py tests/deploy/test_chart.py tests/deploy/test_schedulers.py
	$(EXTRAS_BIN)/python -m benchmarks.frameworks.torch_export --markdown docs/results/torch-export.md
	$(EXTRAS_BIN)/python -m benchmarks.frameworks.own_models --markdown docs/results/own-models.md
	$(EXTRAS_BIN)/python -m benchmarks.frameworks.same_step --markdown docs/results/same-step.md
	$(EXTRAS_BIN)/python -m benchmarks.prediction.module_plans --markdown docs/results/module-plans.md
	$(EXTRAS_BIN)/python -m benchmarks.frameworks.own_scripts --markdown docs/results/own-scripts.md
	$(EXTRAS_BIN)/python -m benchmarks.engines.prefetch --markdown docs/results/prefetch.md

$(DOCS_STAMP): constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check mkdocs-material 'mkdocstrings[python]' codespell mkdocs-jupyter nbclient ipykernel -c constraints.txt
	touch $@

# The site in site/: a dead link, a page outside of the navigation or a docstring that names a wrong parameter fails it.
docs: $(DOCS_STAMP) $(STAMP)
	$(DOCS_BIN)/codespell README.md CONTRIBUTING.md docs --skip '*.png,*.json,*.ipynb,*public-recipes.md'
	$(BIN)/python -m pytest -q tests/docs -m "not nightly"
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --quiet --strict
	$(BIN)/python -m benchmarks.prediction.fit_page --out site/fit.html

# The notebooks, executed by the site's environment with the packages of the product's. --inplace: with their outputs.
NOTEBOOK_OUTPUTS ?= --inplace
notebooks: $(DOCS_STAMP) $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" AUTOTUNE_DB="$$(mktemp -d)/jobs.db" \
	    PYTHONPATH="$(CURDIR):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    $(DOCS_BIN)/jupyter execute $(NOTEBOOK_OUTPUTS) docs/notebooks/*.ipynb

$(RELEASE_STAMP): locks/release.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/release.txt
	touch $@

# In dist/: the sdist and the wheel of autotune-client, which plans and submits without torch and Ray.
client: $(RELEASE_STAMP)
	$(RELEASE_BIN)/python -m release.build autotune-client

# In dist/: sdists and wheels of autotune-client and autotune-parallel, their SBOMs and checksums; the same bytes for the same commit.
release: $(RELEASE_STAMP)
	rm -rf dist
	$(RELEASE_BIN)/python -m release.build --sbom

parity: $(STAMP)
	$(BIN)/python -m benchmarks.correctness.parity --markdown docs/results/parity.md
	$(BIN)/python -m benchmarks.correctness.loss_curves --markdown docs/results/loss-curves.md
	$(BIN)/python -m benchmarks.correctness.narrow_types --markdown docs/results/narrow-types.md
	$(BIN)/python -m benchmarks.correctness.attention_windows --markdown docs/results/attention-windows.md
	$(BIN)/python -m benchmarks.correctness.compressed --markdown docs/results/compressed-communication-benchmark.md

chaos: $(STAMP)
	AUTOTUNE_CHAOS_KILLS=10 AUTOTUNE_CRASH_MATRIX=docs/results/crash-matrix.md AUTOTUNE_RAY_CHAOS=docs/results/ray-chaos.md \
	    $(BIN)/python -m pytest -m chaos

hostile: $(STAMP)
	AUTOTUNE_HOSTILE=docs/results/hostile.md $(BIN)/python -m pytest -m hostile

fuzz: $(STAMP)
	AUTOTUNE_FUZZ_EXAMPLES=300 $(BIN)/python -m pytest -m fuzz

bench: $(STAMP)
	$(BIN)/python -m benchmarks.trials.trial_overhead --markdown docs/results/trial-overhead.md
	$(BIN)/python -m benchmarks.trials.pool_overhead --markdown docs/results/pool-overhead.md
	$(BIN)/python -m benchmarks.trials.hang_and_death --markdown docs/results/hang-and-death.md
	$(BIN)/python -m benchmarks.prediction.dry_run --markdown docs/results/dry-run.md
	$(BIN)/python -m benchmarks.trials.intervals --markdown docs/results/interval-coverage.md
	$(BIN)/python -m benchmarks.goodput --markdown docs/results/goodput.md
	$(BIN)/python -m benchmarks.goodput.live --markdown docs/results/goodput-live.md
	$(BIN)/python -m benchmarks.search.decisions --markdown docs/results/decision-benchmark.md
	$(BIN)/python -m benchmarks.search.challenges --markdown docs/results/challenge-games.md
	$(BIN)/python -m benchmarks.search.live_answers --markdown docs/results/live-answers.md
	$(BIN)/python -m benchmarks.trials.fidelity --markdown docs/results/fidelity.md
	$(BIN)/python -m benchmarks.search.depth --markdown docs/results/depth.md
	$(BIN)/python -m benchmarks.engines.engine --markdown docs/results/engine-benchmark.md
	$(BIN)/python -m benchmarks.engines.best_settings --markdown docs/results/engine-best-settings.md
	$(BIN)/python -m benchmarks.service.load --parts reads processes streams sqlite --markdown docs/results/service-load.md
	$(BIN)/python -m benchmarks.prediction.speed --markdown docs/results/prediction-speed.md
	$(BIN)/python -m benchmarks.prediction.kernel_counts --markdown docs/results/kernel-counts.md
	$(BIN)/python -m benchmarks.engines.data_efficiency --markdown docs/results/data-efficiency-benchmark.md
	$(BIN)/python -m benchmarks.engines.packing --markdown docs/results/packing-benchmark.md
	$(BIN)/python -m benchmarks.engines.nvme_offload --markdown docs/results/nvme-benchmark.md
	$(BIN)/python -m benchmarks.engines.pipeline_program --markdown docs/results/pipeline-program.md
	$(BIN)/python -m benchmarks.engines.update_counts --markdown docs/results/update-counts.md
	$(BIN)/python -m benchmarks.engines.host_counts --markdown docs/results/host-counts.md
	$(BIN)/python -m benchmarks.service.load --parts large --markdown docs/results/service-large-job.md
	$(BIN)/python -m benchmarks.service.page --markdown docs/results/page-performance.md
	$(BIN)/python -m benchmarks.service.page --trials 100000 --runs 3 --markdown docs/results/page-performance-100000.md
	$(BIN)/python -m benchmarks.search.grid --markdown docs/results/reference-grid.md
	$(BIN)/python -m benchmarks.search.live_sweeps --warm --markdown docs/results/live-sweeps.md
	$(BIN)/python -m benchmarks.search.scale_hosts --markdown docs/results/scaling.md
	$(BIN)/python -m benchmarks.engines.deepspeed_engine --markdown docs/results/deepspeed-engine.md
	$(BIN)/python -m benchmarks.search.full_space --markdown docs/results/full-space.md
	$(BIN)/python -m benchmarks.prediction.plan_recipes --markdown docs/results/plan-recipes.md
	$(BIN)/python -m benchmarks.prediction.transfer --markdown docs/results/transfer.md
	$(BIN)/python -m benchmarks.search.against_deepspeed --deepspeed-python $(DEEPSPEED_PYTHON) --markdown docs/results/against-deepspeed.md

validate: $(STAMP)
	$(BIN)/python -m benchmarks.prediction.validation --data $(DATA) --markdown docs/results/validation.md

search: $(STAMP)
	$(BIN)/python -m benchmarks.search.decision_time --markdown docs/results/decision-time.md
	$(BIN)/python -m benchmarks.search.search --data $(DATA) --markdown docs/results/search.md

# Needs torch, NumPy and SciPy alone: no environment is made, PYTHON is the one that has torch. Part after part, each in pieces
# of under ten minutes that resume where the last one ended (status 75); the page has what there is.
GPU_DEVICE ?= cuda
GPU_LINES ?= build/gpu/$(GPU_DEVICE).jsonl
GPU_PAGE ?= docs/results/gpu.md
GPU_CARD ?=
GPU_PARTS ?= first correctness grid sweep by-hand
GPU_AHEAD ?= build/gpu/ahead.jsonl
GPU_PART = $(PYTHON) -m benchmarks.gpu --device $(GPU_DEVICE) --out $(GPU_LINES) --resume $(GPU_LINES) $(GPU_AHEAD) --seconds 520

gpu:
	for part in $(GPU_PARTS); do \
	    for piece in 1 2 3 4 5 6 7 8; do \
	        status=0; $(GPU_PART) --part $$part || status=$$?; \
	        test $$status -eq 75 || break; \
	    done; \
	    test $$status -le 1 || test $$status -eq 75 || exit $$status; \
	done
	test ! -f $(GPU_LINES) || $(PYTHON) -m benchmarks.gpu --page benchmarks/data/gpu-*.jsonl $(GPU_LINES) $(GPU_AHEAD) --card "$(GPU_CARD)" --markdown $(GPU_PAGE)

# What `make gpu` needs of a machine with an index and takes along: wheels of the command line, and what needs no GPU.
gpu-bundle: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.bundle

gpu-ahead:
	$(PYTHON) -m benchmarks.gpu --part correctness --device cpu --size large --items "dry run" "losses on a CPU" \
	    --out $(GPU_AHEAD) --resume $(GPU_AHEAD) --seconds 3600
	$(PYTHON) -m benchmarks.gpu --part grid --device cpu --size large --items "dry run" \
	    --out $(GPU_AHEAD) --resume $(GPU_AHEAD) --seconds 3600

clean:
	rm -rf $(VENV) $(EXTRAS_VENV) $(TRACKERS_VENV) $(OLDEST_VENV) $(RELEASE_VENV) build dist *.egg-info
