# One door: every target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test check fix bench test-kills storm hostile faults test-sanitize wheel clean

setup: $(STAMP)

# torch comes first and by exact version, so that nothing else pulls a larger build
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/everystep/native/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation --editable '.[dev]'
	touch $(STAMP)

demo: setup  ## train a small GPT, kill it, compare every bit
	$(BIN)/everystep demo

test: setup  ## everything that needs no GPU
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal  # most of a test is waiting

check: setup  ## style, types, rooms, and the rules of the house: sizes, vocabulary, pictures
	$(BIN)/ruff format --check src tests examples setup.py
	$(BIN)/ruff check src tests examples setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet tests/tidy

fix: setup
	$(BIN)/ruff format src tests examples setup.py
	$(BIN)/ruff check --fix src tests examples setup.py
	$(BIN)/python -m tests.tidy.pictures

bench: setup  ## the figures of the README, as JSON
	$(BIN)/everystep demo --json
	$(BIN)/everystep bench verify --json

test-kills: setup  ## the long version: 200 kills of the trainer, 50 of the shadow
	EVERYSTEP_KILLS=200 EVERYSTEP_SHADOW_KILLS=50 $(BIN)/python -m pytest --timeout 3600 \
		tests/crash/test_trainer_kills.py tests/crash/test_shadow_kills.py

# the leak checker would report Python itself; torch and OpenMP came without instruments
test-sanitize: setup  ## the C library's tests under address and undefined-behaviour sanitizers
	mkdir -p build
	$(BIN)/python -m everystep.native.build --sanitize build/sanitized.so
	EVERYSTEP_NATIVE=$(CURDIR)/build/sanitized.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -p no:cacheprovider tests/unit/test_twins.py tests/unit/test_twin_advance.py \
		tests/unit/test_digests.py tests/unit/test_sparse.py tests/unit/test_memory.py tests/unit/test_sanitizers.py

N ?= 200
SEED ?= 1
storm: setup  ## draw N training programs from SEED on, run them unbroken and broken, compare every bit
	$(BIN)/python -m tests.storm --n $(N) --seed $(SEED)

hostile: setup  ## change N valid stores from SEED on, seal them again, visit each: nobody may be harmed
	$(BIN)/python -m tests.hostile.stores --n $(N) --seed $(SEED)

faults: setup  ## live N lives on disks that refuse and lose power, from SEED on: every claim must hold
	$(BIN)/python -m tests.faults --n $(N) --seed $(SEED)

# the wheel is made from the source distribution, so that what is missing there is missed here; without the
# C library it would have another name
wheel: setup  ## dist/: the source distribution, and one wheel for every Python 3 on this kind of machine
	rm -rf dist
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > /dev/null
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist dist/*.tar.gz
	ls dist/*.tar.gz dist/*-py3-none-linux_*.whl

clean:
	rm -rf .venv build dist src/*.egg-info
