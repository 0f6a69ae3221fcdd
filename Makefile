# make demo   train GE-ViTs on rotated digits, Performers on pixel graphs and SE(3)-Hyena on charged particles, and draw
#             what symmetry does (10 minutes)
# make report rebuild the tables and figures of the README from the result rows in examples/results
# make test   lint, types and the whole test-suite
# Both set everything up first, in .venv; later runs find it done. SCATTER=0 skips building torch-scatter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready

.PHONY: demo test lint test-cuda bench studies report setup clean

demo: setup
	$(RUN) -W ignore examples/studies/rotated_digits.py
	$(RUN) -W ignore examples/studies/pixel_graphs.py --epochs 8
	$(RUN) -W ignore examples/studies/nbody.py

test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --dist worksteal

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-cuda: setup
	@$(RUN) -c "import torch; print('CUDA device:', torch.cuda.get_device_name() if torch.cuda.is_available() else 'none, running the CPU part')"
	$(RUN) -m pytest -m device

bench: setup
	$(RUN) examples/benchmarks/group_attention.py
	$(RUN) examples/benchmarks/linear_attention.py
	$(RUN) examples/benchmarks/long_context.py
	$(RUN) examples/benchmarks/clifford_product.py

# Only runs without a row in examples/results are trained; from nothing that takes hours on two cores.
studies: setup
	$(RUN) -W ignore examples/studies/rotated_digits.py --study
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --size 14 --models R4_SA --relation ge_vit gsa --kernel-size 3 5 7 0
	$(RUN) -W ignore examples/studies/pixel_graphs.py --study
	$(RUN) -W ignore examples/studies/nbody.py --study
	$(RUN) -W ignore examples/studies/nbody.py --study --models EGNN Transformer --learning-rate 0.003
	$(RUN) -W ignore examples/studies/nbody.py --study --models "SE(3)-Hyena, radial order" --seeds 0
	$(RUN) -W ignore examples/studies/nbody.py --study --models "SE(3)-Hyena + local" "local only" --epochs 300 --seeds 0
	$(RUN) -W ignore examples/studies/associative_recall.py --study
	$(RUN) -W ignore examples/studies/associative_recall.py --study --vocabulary fixed --seeds 1 2
	$(RUN) -W ignore examples/studies/escnn_mixed_model.py --study
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study
	$(RUN) -W ignore examples/studies/e3nn_mixed_model.py --study
	$(RUN) -W ignore examples/studies/report.py

report: setup
	$(RUN) -W ignore examples/studies/report.py

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/setup
	@PYTHON=$(PYTHON) VENV=$(VENV) SCATTER=$(SCATTER) TORCH=$(TORCH) bash .ci/setup
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info out
