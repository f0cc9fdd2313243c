# Every target makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.site-installed

# The release of torch that the environment gets: `make test TORCH=2.11.0`, with another VENV to keep this one.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

# Tests start hundreds of interpreters: without compiled files each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# An environment with another release of torch is installed again.
INSTALLED := $(shell sed -n 's/^torch==//p' $(VENV)/constraints.txt 2>/dev/null)
ifneq ($(filter-out $(TORCH),$(INSTALLED)),)
.PHONY: $(STAMP)
endif

.PHONY: train check test test-of test-programs test-slow test-gpu mutants soak kills lint format docs site bench bench-network matrix dist release-check install-as-deepspeed clean

$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt --editable '.[dev,plots]'
	touch $(STAMP)

# The generator of the site is installed by the target that needs it, so that tests do not wait for it.
$(SITE_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt --editable '.[site]'
	touch $(SITE_STAMP)

train: $(STAMP)  ## the main job: a small GPT learns the standard library's source
	$(BIN)/onefold train $(ARGS)

check: lint  ## before a commit, in under two minutes: lint, types, and one case of each test in tests/check.txt
	$(BIN)/python -m pytest -q -m 'not gpu and not slow' --first-cases $(ARGS)

test: $(STAMP)  ## before a merge: the first tier of all tests, on real gloo ranks
	$(BIN)/python tests/first_tier.py $(ARGS)

test-of: $(STAMP)  ## the tests of one module: make test-of MODULE=onefold/comm/exchange.py
	files=$$($(BIN)/python tests/which.py $(MODULE)) && $(BIN)/python -m pytest -q -m 'not gpu and not slow' $$files $(ARGS)

test-programs: $(STAMP)  ## the part of `make test` that starts interpreters: commands, launchers, examples, the guide
	$(BIN)/python -m pytest -q -m 'program and not gpu and not slow' $(ARGS)

test-slow: $(STAMP)  ## the other combinations of the same tests; ARGS="--slice 3/10" runs a tenth of them
	$(BIN)/python -m pytest -q -m 'slow and not gpu' $(ARGS)

test-gpu:  ## tests that need a CUDA device, with the Python that has it; ARGS="--part 1/3" for a third of their files
	$(PYTHON) -m pytest -q -m gpu $(ARGS)

mutants: $(STAMP)  ## bugs put into a copy of the tree, one at a time: which of them do the tests miss?
	$(BIN)/python tests/mutants.py $(ARGS)

soak: $(STAMP)  ## an hour of training with a fault every half minute, compared with a run without faults (root for all faults)
	$(BIN)/python -m benchmarks.soak $(ARGS)

kills: $(STAMP)  ## a hundred kills at random moments, with all checkpoints checked after each; ARGS="--kills 1000"
	$(BIN)/python -m benchmarks.kills $(ARGS)

lint: $(STAMP)  ## format check, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## regenerate docs/config.md from the dataclasses, docs/what-fits.html from the formulas
	$(BIN)/python docs/tools/config_page.py > docs/config.md
	$(BIN)/python docs/tools/what_fits.py > docs/what-fits.html

site: $(SITE_STAMP)  ## the documentation as a site in build/site, readable offline; every warning is an error
	rm -rf build/site build/site-doctrees
	$(BIN)/sphinx-build --quiet --fail-on-warning --jobs auto -c docs/site -d build/site-doctrees . build/site
	@echo "build/site/index.html"

bench: $(STAMP)  ## onefold beside DDP, FSDP2 and DeepSpeed (where installed), in one run
	$(BIN)/python -m benchmarks.compare $(ARGS)

bench-network: $(STAMP)  ## ZeRO++ between two nodes, as network namespaces with a slow link (needs root)
	$(BIN)/python -m benchmarks.network $(ARGS)

matrix: $(STAMP)  ## frameworks and releases from the package index on onefold; ARGS="--list", "--only 'trl*'", "--failed"
	$(BIN)/python tests/matrix/run.py $(ARGS)

dist: $(STAMP)  ## the sdist and the wheel of a release in dist/, checked; the wheel is built from the sdist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

release-check:  ## that the tag of a release fits its version and its dated section of CHANGELOG; TAG=v0.2.0
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' onefold/version.py); \
	test "$$TAG" = "v$$version" || { echo "the tag '$$TAG' is not v$$version of onefold/version.py" >&2; exit 1; }; \
	grep -Eq "^## $$version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)" CHANGELOG.md || { echo "CHANGELOG.md has no section '## $$version (YYYY-MM-DD)'" >&2; exit 1; }

# Built in a copy, because setuptools leaves build/ where it builds.
install-as-deepspeed:  ## onefold under the name of DeepSpeed, in the environment of $(PYTHON); refuses beside a real one
	@found=$$($(PYTHON) -c "import importlib.metadata as m; print(next((d.version for d in m.distributions(name='deepspeed')), ''))"); \
	case "$$found" in ""|*+onefold) ;; *) echo "DeepSpeed $$found is installed here; pip uninstall deepspeed first" >&2; exit 1;; esac
	copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && cp -R pyproject.toml setup.py README.md LICENSE onefold packaging "$$copy" && \
	$(PYTHON) -m pip install --disable-pip-version-check "$$copy" "$$copy/packaging/deepspeed"

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
