# `make demo` and `make test` do all their own set-up: they need Python 3.10 or newer and make, nothing else.
# Another interpreter: `make test PYTHON=python3.12 VENV=.venv312`.

PYTHON ?= python3
VENV ?= .venv
DEMO := .demo
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.wdskit-demo-installed
STAMP := $(VENV)/.wdskit-installed
DOCS_STAMP := $(VENV)/.wdskit-docs-installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python keeps its compiled files, even if the environment forbids it: hundreds of processes import torch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint docs long bench clean

help:
	@echo "make demo    photos -> pack -> train on 2 ranks, stop, go on on one: a minute after the download of torch"
	@echo "make test    everything that CI runs"
	@echo "make lint    the part of make test that only reads the source"
	@echo "make docs    the documentation site, into build/docs"
	@echo "make long    all of the suites of which make test runs a part; one of them with WHAT:"
	@echo "             WHAT=sizes    every writer and reader at real sizes, on busy cores"
	@echo "             WHAT=faults   a failure or a kill at every disk operation, every kind of damage"
	@echo "             WHAT=soak     random pipelines resumed many times, thousands of breaks and Ctrl-C"
	@echo "             WHAT=peers    other programs that read or write shards, which it installs: 2 GB"
	@echo "             WHAT=remote   servers of S3, Google Cloud Storage, Azure and http, which it installs"
	@echo "             WHAT=fuzz     10^6 damaged JPEGs and shards through C and Python, with sanitizers; an hour"
	@echo "             WHAT=release  sdist and wheel as a user installs them, the oldest versions: downloads 5 GB"
	@echo "             WHAT=gpu      (only if named) batches on a GPU, with a build of torch for it"
	@echo "             WHAT=wheel    (only if named) a wheel of wdskit with its libjpeg inside, into dist"
	@echo "make bench   speed of each part beside webdataset, tar, sha256sum or the bare chain; beside other loaders with"
	@echo "             WHAT=peers    which it installs below .bench; an hour and 10 GB"
	@echo "             WHAT=remote   that read from a store with 30 ms latency; minutes"
	@echo "make clean   remove all files that the other commands made, .venv included"

setup: $(STAMP)

# The requirements of wdskit, and scikit-image without SciPy, for the photographs in its wheel. torch is installed first
# and alone: if pip is set up for CPU builds, it takes that build, and the second call does not replace it. Nothing is
# compiled beforehand, because most of torch is never imported. Without a C compiler and libjpeg-turbo's headers, wdskit
# is installed without its extension in C, and works more slowly.
$(DEMO_STAMP): pyproject.toml constraints.txt setup.py $(wildcard native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps scikit-image
	touch $(DEMO_STAMP)

$(DOCS_STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

# For developers: also the oldest supported webdataset, for the tests of what it reads and writes, and moto, an S3
# server with users and roles.
$(STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/peers/webdataset-0.2.86 webdataset==0.2.86
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/torchvision torchvision==0.28.0
	-$(BIN)/python tools/bench/environments.py $(VENV)/peers moto
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict
	$(BIN)/python tools/dev/check_layers.py
	$(BIN)/python tools/dev/check_size.py

# `lint` and `pytest` run at the same time, because mypy uses only one core.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint pytest

# Each test process has one torch thread, because more threads would only wait for a core. There is one process more
# than cores, because many tests wait for processes, servers and threads. tests/conftest.py puts the longest files
# first. A test that takes five minutes hangs: it fails, and the stacks of its threads are printed.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 -o faulthandler_timeout=400
pytest: $(STAMP)
	$(PYTEST) -n $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) --dist loadfile --no-loadscope-reorder

# All suites, one after the other, also after a failure; or the one that WHAT names.
SUITES = sizes faults soak peers remote fuzz release
long:
	$(MAKE) --no-print-directory $(if $(WHAT),long-$(WHAT),--keep-going $(SUITES:%=long-%))

ALL = OMP_NUM_THREADS=1 WDSKIT_ALL=1 $(BIN)/python -m pytest

# Shards of 60 MB and 100,000 samples, while two processes keep the cores busy.
long-sizes: $(STAMP)
	$(ALL) tests/sizes tests/packing/test_memory.py

long-faults: $(STAMP)
	$(ALL) -n auto tests/promises tests/packing tests/dataset tests/shards tests/tar \
		tests/engine/test_bad_samples.py

long-soak: $(STAMP)
	$(ALL) -n auto tests/loader/test_soak.py tests/stages/test_random_pipelines.py tests/config/test_pairs.py

# The readers, and Ray, have an environment each.
long-peers: $(STAMP)
	$(BIN)/python tools/bench/environments.py $(VENV)/peers energon dali timm open_clip wids ray albumentations
	$(ALL) tests/test_peers.py tests/peers/test_webdataset.py tests/peers/check_*.py

# A server that cannot be installed is listed, and its tests are skipped by name. Azurite needs npm; nginx is taken from
# the PATH, or needs apt-get.
long-remote: $(STAMP)
	-$(BIN)/python tools/bench/environments.py $(VENV)/peers moto fake_gcs azurite nginx
	$(ALL) tests/test_servers.py tests/storage tests/dataset/test_remote.py tests/loader/test_remote.py

long-fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tools/dev/fuzz_native.py --sanitize --images 1000000 --shards 1000000

# With Python 3.10 to 3.12, a part of the tests also runs with the oldest versions that wdskit allows.
long-release: $(STAMP)
	$(ALL) tests/test_release.py

# `make long WHAT=gpu BIN=FOLDER` uses the python in FOLDER.
long-gpu:
	$(BIN)/python -m pytest tests/gpu/check_device.py

long-wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

# Two ranks are stopped in the middle of the first epoch, as a cluster stops a job, and one rank goes on.
TRAIN = OMP_NUM_THREADS=1 DATA=$(DEMO)/data $(BIN)/torchrun --standalone
demo: $(DEMO_STAMP)
	rm -rf $(DEMO)
	$(BIN)/python tools/make_photos.py --num 1600 --seed 1 $(DEMO)/photos
	$(BIN)/wdskit pack $(DEMO)/photos $(DEMO)/data --split train=0.9,val=0.1 --shuffle 1 --max-samples 200
	$(BIN)/wdskit info $(DEMO)/data
	@$(TRAIN) --nproc-per-node 2 tools/train.py --checkpoint $(DEMO)/run.pt --save-every 10 2> $(DEMO)/stopped.log & \
		until test -e $(DEMO)/run.pt; do kill -0 $$! || { cat $(DEMO)/stopped.log; exit 1; }; sleep 0.1; done; \
		kill -TERM $$!; wait $$! || true
	@echo "Two ranks were stopped after ten steps or more. One rank goes on:"
	$(TRAIN) --nproc-per-node 1 tools/train.py --checkpoint $(DEMO)/run.pt --expect-lower-loss
	@echo
	@echo "It works. What to try next:"
	@echo "  $(BIN)/wdskit view $(DEMO)/data"
	@echo "  $(BIN)/wdskit verify $(DEMO)/data"
	@echo "  DATA=$(DEMO)/data $(BIN)/wdskit plan configs/demo.yaml --pipeline train --world-size 4"

# A broken link, a missing heading, a public name without a docstring and an outdated generated page are errors. Needs
# no network.
docs: $(DOCS_STAMP)
	$(BIN)/python tools/dev/generate.py --check
	$(BIN)/zensical build --strict --clean
	@echo "Look at it: $(BIN)/python -m http.server --directory build/docs"

bench: $(STAMP)
	$(BIN)/python tools/bench/bench_$(or $(WHAT),parts).py

clean:
	rm -rf .venv .demo .bench .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f wdskit/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
