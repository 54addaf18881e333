# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Optional: an index with other torch builds, such as the CPU index that PyTorch's install page names.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2

.PHONY: quickstart test test-slow docs install install-dev install-oracle models system system-browser clean

quickstart: install ## set up, then run the main job end to end on the default model
	$(BIN)/sharpen run quickstart --out runs/quickstart

test: install-dev models ## everything that is quick: style, types, tests with coverage
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/ruff format --check src tests benchmarks scripts examples
	$(BIN)/pyright
	$(BIN)/python tests/style.py
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term:skip-covered

test-slow: install-dev install-oracle models system ## kill -9, oracles, the installed wheel; nothing is skipped here
	HF_HUB_OFFLINE=1 SHARPEN_REQUIRE_ALL=1 $(BIN)/python -m pytest -m slow --timeout 1200

docs: install-dev ## API pages in site/
	$(BIN)/pdoc sharpen -o site --docformat google

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch: constraints.txt | $(BIN)/python
	sh scripts/install_torch.sh $(BIN)/python "$(TORCH_INDEX)"
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/torch
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

models: install
	$(BIN)/sharpen models pull pico
	$(BIN)/sharpen models pull smollm2-135m

install-oracle: $(VENV)/installed
	bash scripts/oracle.sh

system: ## bubblewrap, which the sandbox needs; as root
	sh scripts/install_system.sh bwrap bubblewrap
system-browser: ## chromium, which the browser tests need; as root
	sh scripts/install_system.sh chromium chromium

clean:
	rm -rf $(VENV) .venv-oracle site dist build .pytest_cache .ruff_cache .hypothesis .coverage*
