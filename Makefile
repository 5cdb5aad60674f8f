# Everything runs in .venv. Each target that needs it makes it, and brings it up to date
# when pyproject.toml or constraints.txt has changed.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-core test-models test-sweep test-faults test-gpu test-newest-torch browser fuzz soak check fmt docs pictures bench site package clean

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
READY := .venv/.ready
BIN := .venv/bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## a first tour: run `rota demo`
	$(BIN)/rota demo --force

test test-core test-models test-sweep test-faults test-gpu test-newest-torch fuzz soak: export OMP_NUM_THREADS := 1

# The tests start hundreds of processes, each of which would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# In one command, as each of its processes reads all tests first: half a minute of CPU time. Three processes for two
# cores, as tests of processes wait now and then.
test: $(READY) browser ## run every test
	$(BIN)/pytest -rs -m "not faults and not sweep" --numprocesses 3 --dist worksteal

test-core: $(READY) ## run the tests of which none starts processes, side by side
	$(BIN)/pytest -rs -m "not dist and not faults and not sweep" --numprocesses auto --dist worksteal

test-models: $(READY) ## train every unmodified model with every kind of plan on 2 and 4 processes
	$(BIN)/pytest -m "dist and not faults" --numprocesses 1 tests/models/test_models_on_processes.py

test-sweep: export ROTA_WHOLE_SWEEPS := 1
test-sweep: $(READY) ## run the other sweeps: more numbers of ranks, sizes, drawn cases, and ways to start them
	$(BIN)/pytest -m "(sweep or sampled) and not faults" --numprocesses 2 --dist worksteal --ignore tests/models/test_models_on_processes.py

test-faults: $(READY) ## run the tests that kill, stop and starve processes, some minutes
	$(BIN)/pytest -m faults --numprocesses 3 --dist worksteal \
		$$(grep -rl --include='test_*.py' 'pytest\.mark\.faults' tests)

# On x86-64 Linux, .venv gets PyPI's build of PyTorch, which is for CUDA; benchmarks/gpu/README.md explains how to get
# another one.
test-gpu: export ROTA_GPU_TESTS ?= 1
test-gpu: export ROTA_GPU_RESULT = $(abspath $(RESULT))
test-gpu: RESULT ?= benchmarks/gpu/result.json
test-gpu: $(READY) ## test on one GPU or more, some minutes, and write benchmarks/gpu/result.json
	@$(BIN)/python -c 'import torch; print("PyTorch", torch.__version__, "sees", torch.accelerator.device_count(), "accelerators")'
	$(BIN)/pytest -rs --numprocesses 0 tests/gpu

# Its own venv: the newest PyTorch may be above pyproject.toml's ceiling, hence --no-deps. The CPU build comes from its own
# index, which is asked once, for this one package; where that cannot be reached, the package index has a CUDA build.
NEWEST := .venv-newest/bin/python
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
NEWEST_TORCH = torch$(addprefix ==,$(TORCH))
test-newest-torch: ## test what Rota relies on in the newest PyTorch, in .venv-newest (TORCH=2.13.0: in that one)
	$(PYTHON) -m venv --clear .venv-newest
	$(NEWEST) -m pip install -qq --constraint constraints.txt pip
	@$(NEWEST) -m pip install -qq --retries 0 --no-deps --index-url $(TORCH_INDEX) $(NEWEST_TORCH) || \
		echo "there is no CPU build at $(TORCH_INDEX): installing PyTorch from the package index"
	$(NEWEST) -m pip install -qq $(NEWEST_TORCH)
	$(NEWEST) -m pip install -qq --constraint constraints.txt numpy safetensors hypothesis \
		pytest pytest-timeout pytest-xdist
	$(NEWEST) -m pip install -qq --build-constraint constraints.txt --no-deps --editable .
	@$(NEWEST) -c 'import torch; print("PyTorch", torch.__version__)'
	$(NEWEST) -m pytest --numprocesses 0 tests/test_torch_internals.py tests/runtime/gradients \
		tests/runtime/reducing/test_sharded_stages.py tests/runtime/test_training.py

# The tests of the HTML page drive a real browser. Where there is none and it cannot be had, they are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing Chromium for the tests of the HTML page" && \
		{ timeout 60 apt-get update -qq && timeout 180 apt-get install -yqq chromium; } >/dev/null 2>&1; } || \
		echo "there is no Chromium: the tests in tests/drawing/browser will be skipped (as root: apt-get install chromium)"

# An hour for 2,000 plans: no limit of time, but an end.
fuzz: $(READY) ## read wrong files and checkpoints, run 2,000 random plans, and prove the device order of 40,000
	ROTA_FUZZ=1 $(BIN)/pytest --timeout 3600 --numprocesses auto tests/fuzz
	ROTA_RANDOM_PLANS=2000 $(BIN)/pytest --timeout 3600 "tests/runtime/test_random_orders.py::test_random_orders[3]"
	ROTA_RANDOM_DEVICE_ORDERS=40000 $(BIN)/pytest --timeout 3600 --numprocesses auto tests/programs

soak: $(READY) ## run 1,000 steps in a row, then train for 30 minutes while ranks are killed (ROTA_SOAK_MINUTES)
	ROTA_SOAK_STEPS=1000 $(BIN)/pytest --timeout 600 tests/runtime/test_leftovers.py
	$(BIN)/python benchmarks/reliability/soak.py --minutes $${ROTA_SOAK_MINUTES:-30}

check: $(READY) ## lint, formatting, types, what the pages say (links, files, names, commands), and the size
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --quiet --numprocesses 0 tests/docs/test_pages.py tests/docs/test_language.py tests/docs/test_site.py
	@$(MAKE) --no-print-directory site
	@PYTHONPATH=tests $(BIN)/python -m support.size

fmt: $(READY) ## format the code and fix what the linter can
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: $(READY) ## make docs/schedules.md and the pictures of docs/
	$(BIN)/python docs/make_schedules.py
	$(BIN)/python docs/make_frontier.py
	$(BIN)/python docs/make_device_order.py
	$(BIN)/python docs/make_wires.py

pictures: $(READY) ## make the pictures of the README and docs/explain.md, in a browser
	$(BIN)/python docs/make_pictures.py

bench: $(READY) ## run the benchmarks and make docs/results.md (ONLY="import search": these alone)
	$(BIN)/python benchmarks/results.py $(ONLY)

site: $(READY) ## build the pages of docs/ as a site, in site/; a dead link or a page outside of its navigation fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(READY) ## build wheel and sdist, install the wheel into an empty environment, and use it there
	$(BIN)/python packaging/check.py

clean: ## remove all that the other targets made, .venv included
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site rota-demo*/
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip first: the one that comes with Python 3.11 knows neither --group nor --build-constraint.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Rota needs Python 3.11 or newer, and found none as python3.11 or python3." \
		"Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --constraint constraints.txt pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --build-constraint constraints.txt \
		--editable '.[all,examples]' --group dev --group site
	@touch $@
