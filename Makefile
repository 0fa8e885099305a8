# Run `make` for the list of targets.

PYTHON ?= python3
STUDY ?=
SET ?=
BUDGET ?=
PROFILE ?=
BASELINE ?=
WHEELHOUSE ?=
VENV ?=
# Two at a time: a laptop has the cores for it, and runs of two processes still pass.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
LONG ?=
# Rooms without torch, and what a change of the pages or the dependencies breaks first.
QUICK_TESTS = tests/core tests/data tests/analysis tests/run tests/cli \
	tests/project/test_architecture.py tests/project/test_docs.py tests/project/test_environment.py

# PYTHON=3.12 means python3.12, and the wheels of Python 3.12 to `make wheelhouse`.
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python$(PYTHON),$(PYTHON))
PYTHON_VERSION ?= $(PYTHON)

STAMP := .make/python
RUN = "$$(cat $(STAMP))"
OVERRIDES = $(foreach assignment,$(SET),--set '$(assignment)')
MINUTES = $(if $(BUDGET),--budget '$(BUDGET)')
CLUSTER = $(if $(PROFILE),--profile '$(PROFILE)')

# The environment is looked at again when its interpreter is gone, or the caller asks for another.
CHOSEN := $(wildcard $(shell cat $(STAMP) 2>/dev/null))
ASKED := $(filter command%,$(origin PYTHON) $(origin WHEELHOUSE) $(origin VENV))
AGAIN := $(if $(ASKED),again,$(if $(CHOSEN),,again))

.DEFAULT_GOAL := help
.PHONY: help setup plan reproduce bench report test check quick lint fields format pins wheelhouse clean again

help: ## print this list
	@echo "fp8study: should I pre-train in FP8, on my GPUs, for my model?"
	@echo
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | \
		while IFS='|' read -r target what; do printf '%-18s %s\n' "$$target" "$$what"; done
	@echo
	@echo "Variables:"
	@echo "  STUDY=name         the study to plan or reproduce; without it, the default one"
	@echo "  SET='field=value'  fields to set in every run of the study, as SET='corpus=text:my.txt'"
	@echo "  BUDGET=60          minutes that the default study of a machine with GPUs may take; else 20"
	@echo "  PROFILE=slurm      run the study as SLURM jobs, after editing pipelines/profiles/slurm/config.yaml"
	@echo "  BASELINE=folder    results to compare \`make bench\` with; without it, a CPU's, committed"
	@echo "  PYTHON=python3.12  the Python to look at, or to build .venv with (now: $(PYTHON))"
	@echo "  VENV=1             build .venv even if the active environment would do"
	@echo "  WHEELHOUSE=folder  install from these wheels, without network"
	@echo "  LONG=1             the tests that take minutes, too"
	@echo "  PYTEST_ARGS=...    arguments to pytest instead of the usual ones, as PYTEST_ARGS='-k stats'"

setup: $(STAMP) ## choose or build the environment (the active one if it has all, else .venv)
	@echo "setup: using $$(cat $(STAMP)); to choose again: make -B setup"

$(STAMP): pyproject.toml requirements/cpu.txt scripts/setup_environment.py $(AGAIN)
	@"$(INTERPRETER)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "setup: PYTHON=$(PYTHON) is no Python 3.11 to 3.13: name one that is," \
			"as make setup PYTHON=python3.12" >&2; exit 1; }
	@"$(INTERPRETER)" scripts/setup_environment.py \
		$(if $(WHEELHOUSE),--wheelhouse "$(WHEELHOUSE)") $(if $(VENV),--venv)

plan: $(STAMP) ## show the runs of a study, what they cost, and which are done
	@$(RUN) -m fp8study.cli plan $(STUDY) $(OVERRIDES) $(MINUTES) $(CLUSTER)

reproduce: $(STAMP) ## run a study on this machine's GPUs, notebook by notebook
	@$(RUN) -m fp8study.cli reproduce $(STUDY) $(OVERRIDES) $(MINUTES) $(CLUSTER)

bench: $(STAMP) ## measure this machine's throughput as ratios, and compare with a baseline
	@$(RUN) -m fp8study.cli bench $(OVERRIDES) $(if $(BASELINE),--baseline "$(BASELINE)")

report: $(STAMP) ## render the report and BENCHMARKS.md from the records (no GPU)
	@$(RUN) -m fp8study.cli report

test: $(STAMP) ## run the tests; those that need a GPU skip without one
	@$(RUN) -m pytest -q $(PYTEST_ARGS) $(if $(LONG),,-m 'not long')
	@$(if $(LONG),,echo "test: left out those marked long (every way to resume, SLURM); LONG=1 does them")

lint: $(STAMP) ## check style, format, types and the direction of imports
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache

check: $(STAMP) ## lint and the quick tests, while you work
	@$(MAKE) --no-print-directory -j2 lint quick

quick: $(STAMP)
	@$(RUN) -m pytest -q $(PYTEST_ARGS) -m 'not slow' $(QUICK_TESTS)

fields: $(STAMP) ## write the notebook's parameters and docs/configuration.md from the fields
	@$(RUN) scripts/write_fields.py

format: $(STAMP) ## rewrite the sources in the project's style
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

# A fresh resolution under the torch that is pinned now: for another, edit its line first.
# Lines with a marker (needed by other Pythons only) and the header are kept by hand.
pins: ## resolve the exact pins of requirements/cpu.txt anew
	@rm -rf .make/pins && mkdir -p .make
	@grep '^torch==' requirements/cpu.txt > .make/torch.txt
	@"$(INTERPRETER)" -m venv .make/pins
	@.make/pins/bin/python -m pip install -q -c .make/torch.txt '.[dev]'
	@{ grep '^#' requirements/cpu.txt; \
		.make/pins/bin/python -m pip freeze --all --exclude fp8study --exclude pip | \
			sed -e 's/+.*//' -e '/^\(nvidia-.*-cu[0-9]*\|cuda-.*\|triton\)==/d'; \
		grep ';' requirements/cpu.txt; } > .make/cpu.txt
	@mv .make/cpu.txt requirements/cpu.txt && rm -rf .make/pins .make/torch.txt
	@echo "requirements/cpu.txt: $$(grep -c == requirements/cpu.txt) pins"

wheelhouse: ## gather wheels for a GPU node without network, as PYTHON=3.12
	@python3 scripts/wheelhouse.py --python "$(PYTHON_VERSION)" \
		$(if $(WHEELHOUSE),--output "$(WHEELHOUSE)")

clean: ## remove .venv, the wheelhouse, the rendered report and caches; results stay
	rm -rf .venv .make wheelhouse report/_site report/._site-* report/.quarto
	rm -rf .mypy_cache .ruff_cache .pytest_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
