# make train      runs the main job on the digits in the package
# make test       runs the tests (some 6 minutes on 2 cores)
# make install    installs what training, jobs, reports and the server need
# make test-all   also runs the slow tests, on other versions of Python and TensorFlow too, and with more hostile input
# make test-next  runs tests on the newest TensorFlow and Keras, release candidates too
# make lint       runs ruff and mypy
# make bench      runs the benchmarks, with peers in the same run
# Each creates the virtual environment that it needs.

PYTHON ?= python3
VENV ?= .venv
NEXT ?= .venv-next
JOB_DIR ?= runs/digits
RUN := $(VENV)/bin/python
TEST := $(RUN) -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: train test install test-all test-processor test-floor test-versions test-next test-hostile lint bench clean

train: $(VENV)/.installed
	$(RUN) -m trainer.task --recipe=wgan_gp_digits --job_dir=$(JOB_DIR) $(ARGS)

install: $(VENV)/.installed
	$(RUN) -m pip install --quiet --editable '.[deploy,report,serve]'

test: $(VENV)/.installed-dev
	$(TEST) -n 3 -m "not slow" $(ARGS)

# A processor without AVX-512, on which TensorFlow leaves oneDNN off.
test-processor: $(VENV)/.installed-dev
	TF_ENABLE_ONEDNN_OPTS=0 XLA_FLAGS=--xla_cpu_max_isa=AVX2 $(TEST) -n 2 -m processor $(ARGS)

test-all: test test-processor test-hostile test-versions
	$(TEST) -n 3 -m slow $(ARGS)

test-hostile: $(VENV)/.installed-dev
	TRAINER_FUZZ_EXAMPLES=100 $(TEST) -n 3 -q -m hypothesis -k "not figures"

test-versions: $(VENV)/.installed-dev
	$(RUN) tests/versions.py

test-floor: $(VENV)/.installed-dev
	$(RUN) tests/versions.py 3.11

# Newer than what setup.py admits: of TensorFlow the newest release candidate, of Keras the nightly build that it needs.
# First what is relied on beyond documentation.
test-next:
	$(PYTHON) -m venv --clear $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet --editable '.[test]'
	$(NEXT)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement tests/requirements-gcs.txt
	$(NEXT)/bin/python -m pip install --quiet --upgrade --pre tensorflow
	$(NEXT)/bin/python -m pip uninstall --quiet --yes keras keras-nightly
	$(NEXT)/bin/python -m pip install --quiet --pre --no-deps keras-nightly
	$(NEXT)/bin/python -m pip list | grep -E '^(tensorflow|keras)'
	status=0; $(NEXT)/bin/python -m pytest -q tests/trainer/invariance/test_internals.py || status=1; \
	$(NEXT)/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slow" tests/trainer $(ARGS) \
	|| status=1; exit $$status

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.models
	$(RUN) -m benchmarks.workers
	$(RUN) -m benchmarks.workers --scaling=weak
	$(RUN) -m benchmarks.scaling
	$(RUN) -m benchmarks.scale
	$(RUN) -m benchmarks.checkpoint
	$(RUN) -m benchmarks.startup
	$(RUN) -m benchmarks.backtest
	$(RUN) -m benchmarks.plan_memory
	$(RUN) -m benchmarks.plan_fit
	$(RUN) -m benchmarks.serving
	$(RUN) -m benchmarks.gan_quality --minutes=2

clean:
	rm -rf $(VENV) $(NEXT) .venv-3.* build dist *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: install a newer one, or use make PYTHON=python3.12 …"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) cannot create virtual environments: install its venv package (Debian: python3-venv)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.py | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: setup.py tests/requirements-gcs.txt | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --editable '.[dev]'
	$(RUN) -m pip install --quiet --require-hashes --no-deps --requirement tests/requirements-gcs.txt
	touch $@ $(VENV)/.installed
