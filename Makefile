# Every target sets up the virtual environment first if it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help book pdf test notebooks serve exercises lint mutants bench bench-peers measure look clean

help: ## list these targets
	@echo "The Physics of LLM Serving. Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo "Variables: PYTHON=python3.12 (interpreter), NB=chapters/02_the_roofline (one notebook), REFRESH=1 (measure anew), PORT=8001 (for serve)"

.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Error: Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "==> Setting up .venv from constraints.txt (a minute or more, 3 GB on disk)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

book: .venv/.stamp ## build the book into _build/html
	@echo "==> Building the book"
	@$(BIN)/python tools/live_assets.py
	@$(BIN)/jupyter-book build --all -W -n --keep-going --quiet .
	@echo "==> Built: open _build/html/index.html, or run: make serve"

pdf: book ## the whole book as one PDF, _build/book.pdf (needs Chromium)
	@echo "==> Printing the book"
	@$(BIN)/python tools/pdf.py

test: .venv/.stamp ## lint, types, unit tests, every notebook cell, the book, its links and live pages
	@$(BIN)/python tools/run_tests.py

notebooks: .venv/.stamp ## run the chapters and store their outputs (NB=..., REFRESH=1)
	@echo "==> Running the notebooks"
	@$(BIN)/python tools/notebooks.py $(if $(REFRESH),--refresh) $(NB)

serve: book ## build the book and serve it on this machine
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT)))' 2>/dev/null \
	  || { echo "Error: port $(PORT) is taken. Try: make serve PORT=8001" >&2; exit 1; }
	@echo "==> Serving the book on http://127.0.0.1:$(PORT) (Ctrl-C stops it)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

exercises: .venv/.stamp ## a folder for students: the exercises without solutions, in _build/exercises
	@echo "==> Writing the exercises"
	@$(BIN)/python -m tools.exercises

lint: .venv/.stamp ## style, spelling and types only
	@$(BIN)/python tools/run_tests.py lint

mutants: .venv/.stamp ## put known bugs into a copy and see which test notices each
	@echo "==> Trying the mutants"
	@$(BIN)/python tools/mutants.py

bench: .venv/.stamp ## our own code against its roofs and goals, other calculators against ours (ARGS=--quick)
	@echo "==> Running the benchmarks (about twelve minutes)"
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: .venv/.stamp ## vLLM's CPU build against our engine (Linux; 3.4 GB in _build/peers-vllm)
	@echo "==> Comparing with vLLM"
	@$(BIN)/python benchmarks/peers_vllm.py $(ARGS)

measure: .venv/.stamp ## measure this machine, roofs and whole steps, and store records (ARGS=--replace)
	@echo "==> Measuring this machine (some minutes; leave it alone meanwhile)"
	@$(BIN)/python -m servelab.measure $(ARGS)

look: book ## screenshots of every page, wide and narrow, light and dark (needs Chromium)
	@echo "==> Taking screenshots into _build/look"
	@$(BIN)/python tools/look.py _build/html _build/look

clean: ## remove what was built; keep .venv
	@echo "==> Removing build products"
	@rm -rf _build _static/live/assets .pytest_cache .mypy_cache .ruff_cache .hypothesis .jupyter_cache
