# The two commands: `make demo` and `make test`. Both need only Python 3.11+ and make; the first call sets up .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Some virtual machines report AMX and do not have it: bfloat16 then dies of SIGILL unless oneDNN is told before torch loads.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

# The CUDA build of the same torch, for the emulated card: about 5 GB, only for `make emulator` and `make test-emulated`.
VENV_CUDA  ?= .venv-cuda
READY_CUDA := $(VENV_CUDA)/.ready
# A second version of torch for the card: about 5 GB more, only for `make test-emulated-cuda12`.
VENV_CUDA12  ?= .venv-cuda12
READY_CUDA12 := $(VENV_CUDA12)/.ready

.PHONY: demo test test-long test-all test-emulated test-emulated-all test-emulated-cuda12 emulator emulator-cuda12 lint format bench translations clean

demo: $(READY)  ## the main job on the embedded default
	@$(BIN)/brim demo

test: $(READY)  ## everything but the long and the slow tests
	@$(PYTEST) -m "not slow and not long"

test-long: $(READY)  ## tests of ten seconds and more, or of several processes
	@$(PYTEST) -m "long and not slow"

test-all: $(READY)  ## the slow suites too
	@$(PYTEST) --hypothesis-profile new

emulator-cuda12: $(READY_CUDA12)

emulator: $(READY_CUDA)  ## set up the CUDA build of torch for the emulated card (about 5 GB)

test-emulated: $(READY_CUDA)  ## the suite on emulated CUDA cards, without the slow tests
	@$(VENV_CUDA)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" tests/emulated

test-emulated-all: $(READY_CUDA)  ## the slow emulated tests too
	@$(VENV_CUDA)/bin/python -m pytest -q -n 2 --dist worksteal tests/emulated

test-emulated-cuda12: $(READY_CUDA) $(READY_CUDA12)  ## the card itself under torch 2.9.1, built for CUDA 12
	@BRIM_EMULATOR_PYTHON=$(abspath $(VENV_CUDA12))/bin/python $(VENV_CUDA)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" \
		tests/emulated/test_card.py tests/emulated/test_nccl.py

lint: $(READY)  ## style, types, and the arrows between the rooms
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)  ## benchmarks print ratios and never fail a build
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

LOCALE := src/brim/locale
translations: $(READY)  ## bring the Chinese catalogue up to date: new sentences arrive empty, fill them in and run it again
	@mkdir -p build
	@$(BIN)/pybabel -q extract --mapping-file pyproject.toml --keyword N_ --add-location file --no-wrap --sort-by-file --output-file build/brim.pot src/brim
	@$(BIN)/pybabel -q update --domain brim --locale zh_CN --input-file build/brim.pot --output-dir $(LOCALE) \
		--no-fuzzy-matching --ignore-obsolete --ignore-pot-creation-date --no-wrap
	@$(BIN)/pybabel -q compile --domain brim --directory $(LOCALE)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("brim needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@echo "Setting up $(VENV) (once; a few minutes, most of it torch)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --constraint constraints.txt --editable '.[train,dev,quant,deepspeed]'
	@touch $@

# Three equal signs: the local version 2.13.0+cpu does not match, so pip takes the CUDA build.
$(READY_CUDA): pyproject.toml constraints.txt
	@echo "Setting up $(VENV_CUDA) with the CUDA build of torch (once; about 5 GB and a few minutes)" >&2
	@test -x $(VENV_CUDA)/bin/python || $(PYTHON) -m venv $(VENV_CUDA)
	@mkdir -p build && sed '/^torch==/d' constraints.txt > build/constraints-cuda.txt
	@$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --constraint build/constraints-cuda.txt \
		"$$(sed -n 's/^torch==/torch===/p' constraints.txt)" liger-kernel==0.8.5 --editable '.[train,dev,quant,deepspeed]'
	@touch $@

$(READY_CUDA12):
	@echo "Setting up $(VENV_CUDA12) with torch 2.9.1 for CUDA 12 (once; about 5 GB and a few minutes)" >&2
	@test -x $(VENV_CUDA12)/bin/python || $(PYTHON) -m venv $(VENV_CUDA12)
	@$(VENV_CUDA12)/bin/python -m pip install --quiet --disable-pip-version-check --no-input 'torch===2.9.1' numpy nvidia-ml-py
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_CUDA) $(VENV_CUDA12) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
