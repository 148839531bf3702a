# make demo       install, train the built-in tiny model with GRPO, plot the run (again: resume it, plot)
# make test       install, run the fast tests
PYTHON = .venv/bin/python
LOCK = .ci/requirements.lock
# Two workers of one thread each, which is faster than one of two.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist worksteal

# uv installs where it is there: many times faster than pip, and with the build of torch for this machine's GPU or CPU.
ifneq ($(shell command -v uv),)
VENV = uv venv --allow-existing --python ">=3.11,<3.15"
INSTALL = uv pip install --torch-backend=auto --python $(PYTHON)
else
VENV = python3 -m venv .venv && $(PYTHON) -m pip install --quiet --upgrade "pip>=25.1"  # which knows --group
INSTALL = $(PYTHON) -m pip install
endif

.PHONY: demo test
demo: .venv/installed
	$(PYTHON) main.py --model_name tiny/1m --dataset_name arithmetic --output_dir output/demo --num_train_iters 100 \
		--rollout_batch_size 128 --group_size 16 --max_completion_length 160 --learning_rate 1e-4 --micro_batch_tokens 4096 \
		--eval_iterations 20 --eval_size 500 --save_iterations 100 $(DEMO_FLAGS) $$([ ! -e output/demo/args.json ] || echo --resume)
	$(PYTHON) plotter.py --log_dir output/demo

test: .venv/installed
	$(PYTEST) -m "not slow"

# This file remembers that .venv has the versions of the lock.
.venv/installed: requirements.txt pyproject.toml $(LOCK)
	$(VENV)
	@$(INSTALL) -r requirements.txt --group dev -c $(LOCK) || \
		{ echo "error: the packages could not be installed (is the index reachable? see above)" >&2; exit 1; }
	touch $@

# --- Not in the copy for a candidate --------------------------------------------------------------
# make interview  a copy for a candidate: five tasks, and nothing that solves them
# make test-slow  run the other tests
# make lock       write .ci/requirements.lock anew (needs uv)

.PHONY: lint test-slow interview lock
test: lint
lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

test-slow: .venv/installed
	$(PYTEST) -m slow

interview: .venv/installed
	$(PYTHON) experiments/make_interview.py

# CUDA's packages are left out: each build of torch asks for its own.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		requirements.txt --group dev | grep -vE "^(cuda|nvidia|triton)" > $(LOCK).new
	mv $(LOCK).new $(LOCK)
