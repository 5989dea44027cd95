# Two commands matter: `make serve` and `make test`. Both start from a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install serve dev test chaos clients fuzz lint format schemas models clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Seedance needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create .venv and install everything

models: $(STAMP)  ## prepare the default models (once)
	$(BIN)/seedance models pull

serve: $(STAMP)  ## install, prepare the model, serve it on http://127.0.0.1:8000
	$(BIN)/seedance serve serve_config.yaml

dev: $(STAMP)  ## the page and the APIs on a mock model, reloaded when a file changes
	$(BIN)/seedance dev

lint: $(STAMP)  ## ruff, mypy, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

schemas: $(STAMP)  ## write the frames' types into docs/
	$(BIN)/python -m protocol.schemas > docs/schemas/seedance.v1.json
	$(BIN)/python -m protocol.async_api > docs/asyncapi.yaml

format: $(STAMP)  ## rewrite in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint models  ## lint, then every test: units, a real Serve cluster, the real model, a browser
	$(BIN)/pytest

REPEATS ?= 10
chaos: $(STAMP) models  ## kill and hang parts of a cluster, REPEATS=10 times each: about an hour
	$(BIN)/pytest tests/chaos -m chaos --repeats $(REPEATS)

FUZZ_SECONDS ?= 600
clients: $(STAMP) models  ## other people's clients against a real server: about half an hour
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest tests/clients -m clients
	$(BIN)/python -m tests.clients.results

SECONDS ?= 600
fuzz: $(STAMP)  ## fuzz the protocol for SECONDS=600
	$(BIN)/python -m pip install --quiet -e '.[fuzz]'
	$(BIN)/python bench/fuzz.py --seconds $(SECONDS)

clean:  ## remove what was installed and built here (prepared models stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
