# `host.py run` sets up what is missing (a venv and the pinned ComfyUI, see scripts/host.py) and runs its Python. Where
# there is no make, as on Windows, type the commands below by hand.
PYTHON ?= python3
RUN = $(PYTHON) scripts/host.py run
PYTEST_ARGS ?=
EVIDENCE_ARGS ?=

.PHONY: demo test browser pictures lint test-gpu bench evidence build release setup clean

demo:  ## a tiny Wan2.1, dense, sparse and its student beside each other, in the real ComfyUI: out/demo/
	$(RUN) scripts/demo.py

test: lint  ## everything that needs no GPU; a file's tests share a process, and with it a ComfyUI
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not gpu" -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

browser:  ## playwright, and a Chromium where there is none: without them the tests of the front end are skipped
	$(RUN) scripts/browser.py install

pictures:  ## docs/*.jpg and web/docs/pictures/ anew, from the front end
	$(RUN) scripts/browser.py pictures

lint:  ## nodes/ is checked under the name of a pack, as its relative imports need one
	$(RUN) -m ruff check .
	$(RUN) -m mypy sparge_core scripts
	mkdir -p .cache/types && ln -sfn ../.. .cache/types/spargeattention2
	MYPYPATH=.cache/types $(RUN) -m mypy -p spargeattention2.nodes

test-gpu:  ## needs an NVIDIA GPU, and of ComfyUI nothing: runs in the Python that is active
	$(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

bench:
	$(PYTHON) -m benchmarks.attention

evidence:  ## a tiny Wan2.1, trained on an NVIDIA GPU, and the paper's claims measured on it, in out/evidence/
	$(PYTHON) -m benchmarks.evidence $(EVIDENCE_ARGS)

build:  ## the CUDA kernels of every architecture, ahead of time
	$(RUN) -m sparge_core.cuda build

release:  ## dist/: the pack's archive and the wheel of what is committed, with all kernels, checked and tried
	$(RUN) scripts/release.py --demo

setup:
	$(PYTHON) scripts/host.py setup

clean:
	rm -rf .cache out dist
