# make demo      three quick starts: train an escnn, a PyG and an e3nn model with our layers, and draw what came of it
# make test      lint, types and the tests
# make test-all  the same with the tests marked slow, make test-hosts and make test-oldest
# make test-hosts  the tests of MACE, NequIP and ASE, and of e3nn 0.4.4, each host in a virtual environment of its own
# make test-oldest  the tests of the core with the oldest torch that pyproject.toml allows, in .venv-oldest (OLDEST=...)
# make docs      the documentation, in docs/_build/html; GALLERY=0 leaves out running the tutorials
# make report    rebuild the tables and figures of the README and the docs from the result rows in examples/results
# make studies   train what has no result row yet; MOLECULES=folder of published files adds theirs, PROTEINS=file of C-alpha traces its own, a folder or link mnist its own
# make bench     time the layers against what they replace
# make first-gpu   on a GPU: its tests, every benchmark, what "auto" should choose there; a table in out/first_gpu
# Each sets up what it needs first, in .venv; later runs find it done. SCATTER=0 skips building torch-scatter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready-examples
READY_ALL := $(VENV)/.ready-all
OLDEST ?= torch==2.8.0
SETUP := PYTHON=$(PYTHON) VENV=$(VENV) SCATTER=$(SCATTER) TORCH=$(TORCH) bash .ci/setup
PYTEST := -m pytest --numprocesses auto --dist worksteal
TESTS := OMP_NUM_THREADS=1 $(RUN) $(PYTEST)

.PHONY: demo test test-all test-hosts test-oldest lint test-cuda first-gpu docs bench studies report setup setup-all clean

# One thread: on cores that others use too, waiting for a second one took several times as long.
demo: setup
	@echo "Three trainings, two to three minutes on two cores."
	@for host in escnn pyg e3nn; do \
		echo; echo "== examples/quickstart_$$host.py: $$(sed -n '1s/^"""Quick start with [^:]*: //p' examples/quickstart_$$host.py)"; \
		$(RUN) examples/quickstart_$$host.py || exit 1; \
	done
	@echo; echo "The figures are in $(CURDIR)/out: quickstart_escnn.png, quickstart_pyg.png, quickstart_e3nn.png"

test: lint
	$(TESTS) -m "not slow"

test-all: lint test-hosts test-oldest
	$(TESTS)

# MACE and NequIP want different releases of e3nn, so each has a virtual environment of its own.
test-hosts:
	@for host in mace nequip; do \
		PYTHON=$(PYTHON) VENV=$(VENV)-$$host TORCH=$(TORCH) bash .ci/setup $$host,xtb,test && \
		OMP_NUM_THREADS=1 $(VENV)-$$host/bin/python $(PYTEST) tests/integrations/$$host tests/integrations/ase \
			tests/examples/test_host_models.py || exit 1; \
	done
	TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 OMP_NUM_THREADS=1 $(VENV)-mace/bin/python $(PYTEST) tests/integrations/e3nn

# For Linux, torch 2.8 comes with CUDA unless a CPU build is provided: a download of 3 GB.
CORE_TESTS := encodings functional nn batch_norms checkpointing checks contract grids groups neighbors node_batch numpy_numbers precision
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

first-gpu: setup-all
	$(RUN) -W ignore examples/benchmarks/first_gpu.py --device cuda

docs: setup-all
	$(VENV)/bin/sphinx-build -W -b html $(if $(filter 0,$(GALLERY)),-D plot_gallery=0) docs docs/_build/html

bench: setup
	$(RUN) -W ignore examples/benchmarks/frames.py
	$(RUN) examples/benchmarks/group_attention.py
	$(RUN) examples/benchmarks/linear_attention.py
	$(RUN) examples/benchmarks/graph_attention.py
	$(RUN) examples/benchmarks/global_attention.py
	$(RUN) examples/benchmarks/long_context.py
	$(RUN) examples/benchmarks/clifford_product.py
	$(RUN) -W ignore examples/benchmarks/waves.py

PUBLISHED = @[ -z "$(MOLECULES)" ] || $(VENV)-mace/bin/python -W ignore
TRACES = @[ -z "$(PROTEINS)" ] || $(RUN) -W ignore
# Only runs without a row in examples/results are trained; from nothing that takes hours on two cores.
studies: setup
	$(RUN) -W ignore examples/studies/rotated_digits.py --study
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models "C4 G-CNN" "C8 G-CNN" "D4 G-CNN" --learning-rate 0.04
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models R4_SA --relation ge_vit relative --locality None
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame separable --head-channels 1 --models R4_SA --heads 15 --channels 16
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame separable --head-channels 1 --models R8_SA R4M_SA --heads 12 --channels 12
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame --head-channels 1 --models R4_SA --heads 15 --channels 16 --learning-rate 0.01 --seeds 0 1 2
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame --head-channels 1 --models R8_SA R4M_SA --heads 12 --channels 12 --learning-rate 0.01 --seeds 0 1 2
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models "C4 G-CNN" "C8 G-CNN" "D4 G-CNN" --learning-rate 0.01 --seeds 0 1 2
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame --head-channels 1 --models R4_SA --heads 15 --channels 16 --epochs 24 --seeds 0 1 2
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame --head-channels 1 --models R8_SA --heads 12 --channels 12 --epochs 24 --seeds 0 1 2
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --relation frame --head-channels 1 --models R4M_SA --heads 12 --channels 12 --epochs 24 --seeds 0 1
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models "C8 G-CNN" "D4 G-CNN" --epochs 24 --seeds 0 1
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models "C8 G-CNN" "D4 G-CNN" --epochs 24 --seeds 0 1 2 --learning-rate 0.04
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --epochs 24 --kernel-size 3 5
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models "C4 G-CNN" --epochs 24 --seeds 0 1 2
	$(RUN) -W ignore examples/studies/rotated_digits.py --study --models "C4 G-CNN" --epochs 24 --seeds 0 1 2 --learning-rate 0.04
	@[ ! -e mnist ] || $(RUN) -W ignore examples/studies/rotated_digits.py --study --data mnist --size 14 --blocks 2 --batch 32 --seeds 0 1 2 --models R4_SA --relation relative
	@[ ! -e mnist ] || $(RUN) -W ignore examples/studies/rotated_digits.py --study --data mnist --size 14 --blocks 2 --batch 32 --seeds 0 1 2 --models R4_SA --relation frame --head-channels 1 --heads 15
	@[ ! -e mnist ] || $(RUN) -W ignore examples/studies/rotated_digits.py --study --data mnist --size 14 --blocks 2 --batch 32 --seeds 0 1 2 --models R4_SA --relation ge_vit --locality None
	@[ ! -e mnist ] || $(RUN) -W ignore examples/studies/rotated_digits.py --study --data mnist --size 14 --blocks 2 --batch 32 --seeds 0 1 2 --models R4_SA --relation gsa --locality None
	@[ ! -e mnist ] || $(RUN) -W ignore examples/studies/rotated_digits.py --study --data mnist --size 14 --blocks 2 --batch 32 --seeds 0 1 2 --models "C4 G-CNN" --learning-rate 0.04
	@[ ! -e mnist ] || $(RUN) -W ignore examples/studies/rotated_digits.py --study --data mnist --size 14 --blocks 2 --batch 32 --seeds 0 1 2 --models "C4 G-CNN" --learning-rate 0.04 --epochs 40
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --locality 1 2 8
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --learning-rate 0.01
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --learning-rate 0.04
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --models R8_SA --locality 1
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --heads 4 --channels 24
	$(RUN) -W ignore examples/studies/rotated_digits.py --ablations --without nothing --heads 16 --channels 10
	$(RUN) -W ignore examples/studies/pixel_graphs.py --study
	$(RUN) -W ignore examples/studies/nbody.py --study
	$(RUN) -W ignore examples/studies/nbody.py --study --models EGNN Transformer --learning-rate 0.003
	$(RUN) -W ignore examples/studies/nbody.py --study --models "SE(3)-Hyena, radial order" --seeds 0
	$(RUN) -W ignore examples/studies/nbody.py --study --models "SE(3)-Hyena + local" "local only" --epochs 300 --seeds 0
	$(RUN) -W ignore examples/studies/associative_recall.py --study
	$(RUN) -W ignore examples/studies/associative_recall.py --study --models "SE(3)-Hyena" --seeds 1 2
	$(RUN) -W ignore examples/studies/associative_recall.py --study --models "SE(3)-Hyena" --lengths 512 1024
	$(RUN) -W ignore examples/studies/escnn_mixed_model.py --study
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study --edges "near pairs" touching --learning-rate 0.01
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study --edges "near pairs" touching --learning-rate 0.003 --seeds 0
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study --edges "near pairs" touching --learning-rate 0.02 --seeds 0
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study --learning-rate 0.001 --seeds 0
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study --edges touching --models "local only" Performer --learning-rate 0.003
	$(RUN) -W ignore examples/studies/pyg_mixed_model.py --study --models "Performer + positions" --learning-rate 0.003
	$(RUN) -W ignore examples/studies/e3nn_mixed_model.py --study
	$(RUN) -W ignore examples/studies/long_range.py --study --operators none SE3HyenaOperator VectorSelfAttention "all pairs" --clip 0 --warmup 0
	$(RUN) -W ignore examples/studies/long_range.py --study --operators EwaldAttention "Ewald message passing"
	$(RUN) -W ignore examples/studies/long_range.py --study --task forces --train 256 --operators SE3HyenaOperator VectorSelfAttention "all pairs" --clip 0 --warmup 0
	$(RUN) -W ignore examples/studies/long_range.py --study --task forces --train 256 --operators none EwaldAttention "Ewald message passing"
	$(RUN) -W ignore examples/studies/crystals.py --study --operators none --cutoff 2 4 --warmup 0
	$(RUN) -W ignore examples/studies/crystals.py --study --operators EwaldAttention --trained-on crystals clouds
	$(RUN) -W ignore examples/studies/crystals.py --study --operators EwaldAttention --trained-on both --seeds 0 1
	$(RUN) -W ignore examples/studies/dynamics.py --study --operators none SE3HyenaOperator VectorSelfAttention
	$(RUN) -W ignore examples/studies/superpixel_digits.py --study --seeds 0
	$(RUN) -W ignore examples/studies/superpixel_digits.py --study --seeds 0 --learning-rate 0.005
	$(RUN) -W ignore examples/studies/superpixel_digits.py --study --seeds 0 --learning-rate 0.02
	$(RUN) -W ignore examples/studies/superpixel_digits.py --study --models "no attention" "no attention, positions" Performer "Performer, positions" ours "ours, far offsets" "ours, far part off" "Performer, lengths"
	$(RUN) -W ignore examples/studies/superpixel_digits.py --study --models "Performer, moved positions" dense "no attention, lengths" "ours, far part off" --learning-rate 0.02
	$(RUN) -W ignore examples/studies/superpixel_digits.py --study --models PointTransformer "ours, lengths" "CNN on pixels" --learning-rate 0.005
	$(RUN) -W ignore examples/studies/shape_clouds.py --study --models distance mlp --learning-rate 0.005
	$(RUN) -W ignore examples/studies/shape_clouds.py --study --models PointNet++ DGCNN
	$(RUN) -W ignore examples/studies/molecules.py --study --seeds 0 --models "local only" Performer "Performer + positions" dense SchNet
	$(RUN) -W ignore examples/studies/molecules.py --study --seeds 0 --learning-rate 0.005 --models "local only" Performer "Performer + positions" dense SchNet
	$(RUN) -W ignore examples/studies/molecules.py --study --seeds 0 --learning-rate 0.02 --models SchNet
	$(RUN) -W ignore examples/studies/molecules.py --study --learning-rate 0.02 --models "local only" Performer "Performer + positions" dense ours "ours, exact" "ours, far part off"
	$(RUN) -W ignore examples/studies/molecules.py --study --models SchNet
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --batch 4 --seeds 0 1
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --batch 4 --learning-rate 0.005
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --batch 4 --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --batch 4 --sets cumulenes --irreps "32x0e + 32x1o + 32x2e"
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --batch 4 --sets cumulenes --irreps "32x0e + 32x1o + 32x2e" --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets dimers --seeds 0 1
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets dimers --after 1 --kernels 2 2 0 --epochs 100
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets dimers --after energies --kernels 2 2 0 --seeds 0 1
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets dimers --after energies --kernels 2 2 0 --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets dimers --after energies --kernels 2 2 0 --learning-rate 0.005
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets dimers --after energies --kernels 2 2 0 --irreps 64x0e
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets C9H4
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets SN2 --epochs 100
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets AcAc --seeds 0 1
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets chains salt clusters --epochs 20
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets C9H4 --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets SN2 --epochs 100 --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets AcAc --seeds 0 1 --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets chains salt clusters --epochs 20 --learning-rate 0.02
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets C9H4 --learning-rate 0.005
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets SN2 --epochs 100 --learning-rate 0.04
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets AcAc --seeds 0 1 --learning-rate 0.005
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets chains salt --epochs 20 --learning-rate 0.04
	$(PUBLISHED) examples/studies/real_molecules.py --study --data "$(MOLECULES)" --sets clusters --epochs 20 --learning-rate 0.005
	$(RUN) -W ignore examples/studies/far_digits.py --study
	$(RUN) -W ignore examples/studies/far_digits.py --study --models "global, no rotations" --learning-rate 0.01
	$(RUN) -W ignore examples/studies/far_digits.py --study --models "exact attention" --seeds 0
	$(RUN) -W ignore examples/studies/solid_shapes.py --study
	$(RUN) -W ignore examples/studies/solid_shapes.py --study --models "GE-ViT, frames" --seeds 0 1
	$(RUN) -W ignore examples/studies/scaled_digits.py --study --models convolution "convolution, scales" "no scales"
	$(RUN) -W ignore examples/studies/scaled_digits.py --study --models convolution "convolution, scales" "no scales" --learning-rate 0.02 --seeds 0
	$(RUN) -W ignore examples/studies/scaled_digits.py --study --models scales "scales, mixed" --learning-rate 0.02
	$(RUN) -W ignore examples/studies/scaled_digits.py --study --models scales "scales, mixed" --seeds 0
	$(RUN) -W ignore examples/studies/matching.py --study --models frames
	$(RUN) -W ignore examples/studies/matching.py --study --models frames --cells 4 --epochs 5
	$(RUN) -W ignore examples/studies/matching.py --study --models frames --cells 4 --epochs 20
	$(RUN) -W ignore examples/studies/matching.py --study --models relative "frames, no content" --cells 4
	$(RUN) -W ignore examples/studies/matching.py --study --models relative --cells 2 6 --seeds 0
	$(RUN) -W ignore examples/studies/matching.py --study --models "G-CNN + mean" --norm batch
	$(RUN) -W ignore examples/studies/matching.py --study --models "G-CNN + mean" --norm batch --cells 4 --epochs 20
	$(RUN) -W ignore examples/studies/matching.py --study --models "wide G-CNN" --norm batch --learning-rate 0.003 --cells 4 6
	$(RUN) -W ignore examples/studies/matching.py --study --models "deep G-CNN + mean" --norm batch --learning-rate 0.03 --cells 4 6
	$(RUN) -W ignore examples/studies/matching.py --study --models "dilated G-CNN" --norm batch --learning-rate 0.003 --cells 4
	$(RUN) -W ignore examples/studies/matching.py --study --models "deep G-CNN" --norm batch --learning-rate 0.03 --cells 4
	$(RUN) -W ignore examples/studies/matching.py --study --cells 4 --seeds 0
	$(RUN) -W ignore examples/studies/matching.py --study --cells 4 --seeds 0 --learning-rate 0.003 --models frames relative "frames, no content" "G-CNN + mean" "deep G-CNN" "dilated G-CNN" "wide G-CNN" "deep G-CNN + mean"
	$(RUN) -W ignore examples/studies/matching.py --study --cells 4 --seeds 0 --learning-rate 0.03 --models frames relative "frames, no content" "G-CNN + mean" "deep G-CNN" "dilated G-CNN" "wide G-CNN" "deep G-CNN + mean"
	$(RUN) -W ignore examples/studies/matching.py --study --cells 4 --seeds 0 --norm batch --models "frames, no content" "G-CNN + mean" "deep G-CNN" "dilated G-CNN" "wide G-CNN" "deep G-CNN + mean"
	$(RUN) -W ignore examples/studies/matching.py --study --cells 4 --seeds 0 --norm batch --learning-rate 0.003 --models "frames, no content" "G-CNN + mean" "deep G-CNN" "dilated G-CNN" "wide G-CNN" "deep G-CNN + mean"
	$(RUN) -W ignore examples/studies/matching.py --study --cells 4 --seeds 0 --norm batch --learning-rate 0.03 --models "frames, no content" "G-CNN + mean" "deep G-CNN" "dilated G-CNN" "wide G-CNN" "deep G-CNN + mean"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 0
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 0 --learning-rate 0.003
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 0 --learning-rate 0.012
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 1 2 --learning-rate 0.012 --models "far offsets" "far offsets, pairs" "far offsets, near only" GATv2 PointTransformer "Performer, shifts"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 1 2 --models Performer "dense, shifts"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 1 2 --learning-rate 0.003 --models content "Performer, centred"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks displacement --seeds 0 1 2 --epochs 16 --learning-rate 0.012 --models "far offsets"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks distance --seeds 0 --learning-rate 0.012
	$(RUN) -W ignore examples/studies/depots.py --study --tasks distance --seeds 0 --learning-rate 0.003 --models content "Performer, centred"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks distance --seeds 0 --models "dense, shifts"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks distance --seeds 1 2 --learning-rate 0.012 --models "far offsets" "far offsets, pairs" content GATv2 PointTransformer "Performer, centred"
	$(RUN) -W ignore examples/studies/depots.py --study --tasks distance --seeds 1 2 --models "dense, shifts"
	$(TRACES) examples/studies/proteins.py --study --data "$(PROTEINS)" --tasks response --seeds 0 --models messages EGNN Ewald
	$(RUN) -W ignore examples/studies/report.py

report: setup
	$(RUN) -W ignore examples/studies/report.py

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
