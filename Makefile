# `make demo` speaks a sentence, `make test` runs the tests. Both set up .venv first if it is not there;
# they need python3 (3.10 to 3.13) and nothing else.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# On Linux, PyPI's build of PyTorch brings gigabytes of CUDA along; this index has the CPU build.
# For a machine with a GPU: make demo TORCH_INDEX=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TEXT ?= One melody, several voices: each of them fills the rests of the others.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check clients bench eval
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/hocket say "$(TEXT)" -o demo.wav

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two clients that want other versions of what we use, LiveKit's and Pipecat's: .venv with them on top.
clients: $(VENV)-clients/.installed
	PYTHONPATH=. $(VENV)-clients/bin/python -m pytest tests/server/test_clients.py

bench: $(VENV)/.installed
	$(BIN)/python benches/cpu.py $(ARGS)

# What an offline Whisper understands of the bundled voice: twelve sentences, with room above what it was when it came.
eval: $(VENV)/.installed-hear
	$(BIN)/hocket eval hocket/bundled --limit 12 --seeds 1 --whisper tiny.en --max-wer 30 --max-missed 0 --max-looped 0 $(ARGS)

# Each step of the set-up leaves a stamp, so that a second run does nothing.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit(\
		f"hocket needs Python 3.10 to 3.13, this is {v.major}.{v.minor}: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=23.1"
	@touch $@

# PyTorch comes first and alone, because its build matters: what is in .venv already stays; else a wheel of
# the user's own (pip's find-links); else the CPU index, asked once so that a closed network costs seconds and
# a broken download stops instead of turning into the big one; else whatever pip's own index has.
FROM_INDEX = PIP_EXTRA_INDEX_URL="$(TORCH_INDEX)" $(PIP) install --no-deps --index-url "$(TORCH_INDEX)"

$(VENV)/.torch: $(VENV)/.created
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then \
		echo "PyTorch is in $(VENV) already"; \
	elif [ "$$(uname)" != Linux ] || [ -z "$(TORCH_INDEX)" ]; then \
		$(PIP) install "$(TORCH)"; \
	elif $(PIP) install --quiet --no-deps --no-index "$(TORCH)" 2>/dev/null; then \
		echo "PyTorch from a local wheel"; \
	elif $(FROM_INDEX) --quiet --dry-run --retries 0 --timeout 10 "$(TORCH)" 2>/dev/null; then \
		$(FROM_INDEX) "$(TORCH)"; \
	else \
		echo "$(TORCH_INDEX) has no $(TORCH) for us, or does not answer."; \
		echo "Taking PyTorch from pip's own index: several GB if that is a CUDA build."; \
		$(PIP) install "$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-hear: pyproject.toml $(VENV)/.installed
	$(PIP) install --quiet --editable ".[hear]"
	@touch $@

$(VENV)-clients/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-clients
	ls -d $(CURDIR)/$(VENV)/lib/python3.*/site-packages > $$(ls -d $(VENV)-clients/lib/python3.*/site-packages)/hocket.pth
	$(VENV)-clients/bin/python -m pip --disable-pip-version-check install --quiet livekit-plugins-openai pipecat-ai
	@touch $@
