# make demo       install, train the built-in tiny model with GRPO, plot the run
# make test       install, lint, run the fast tests; make test-slow: the others
# make exercise   a copy of the repository in output/exercise whose compute_loss is yours to write
# make test-exercise   judge it in three stages, each when the one before is green
# make lock       write .ci/requirements.lock anew (needs uv); make format: let ruff lay the code out
PYTHON = .venv/bin/python
DEMO = output/demo
EXERCISE = output/exercise
# Two workers of one thread each, which is faster than one of two.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist worksteal
LOCK = .ci/requirements.lock

# uv installs where it is there: many times faster than pip, and with the build of torch for this machine's GPU or CPU.
ifneq ($(shell command -v uv),)
VENV = uv venv --allow-existing --python ">=3.11,<3.15"
INSTALL = uv pip install --torch-backend=auto --python $(PYTHON) -c $(LOCK)
else
VENV = python3 -m venv .venv && $(PYTHON) -m pip install --quiet --upgrade "pip>=25.1"  # which knows --group
INSTALL = $(PYTHON) -m pip install -c $(LOCK)
endif
NO_INDEX = { echo "error: the packages could not be installed (is the index reachable? see above)" >&2; exit 1; }

.PHONY: demo test test-slow lint format exercise test-exercise lock
demo: .venv/installed
	@if [ -e $(DEMO)/finished ]; then old=$(DEMO)-$$(date +%Y%m%d-%H%M%S); mv $(DEMO) $$old; echo "the last demo is now in $$old"; fi
	$(PYTHON) main.py --model_name tiny/1m --dataset_name arithmetic --output_dir $(DEMO) --num_train_iters 100 \
		--rollout_batch_size 128 --group_size 16 --max_completion_length 160 --learning_rate 1e-4 --micro_batch_tokens 4096 \
		--eval_iterations 20 --eval_size 500 --save_iterations 100 $(DEMO_FLAGS) $$([ ! -e $(DEMO)/args.json ] || echo --resume)
	$(PYTHON) plotter.py --log_dir $(DEMO)
	@touch $(DEMO)/finished

test: lint
	$(PYTEST) -m "not slow"

test-slow: .venv/installed-dev
	$(PYTEST) -m slow

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/installed-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

exercise: .venv/installed-dev
	$(PYTHON) experiments/make_exercise.py --output_dir $(EXERCISE)

test-exercise:
	@[ -e $(EXERCISE)/main.py ] || { echo "error: there is no exercise in $(EXERCISE): run make exercise first" >&2; exit 2; }
	@cd $(EXERCISE) && for stage in 1 2 3; do \
		sed -n "s/^## Stage $$stage/Next, stage $$stage/p" experiments/exercise.md; \
		OMP_NUM_THREADS=1 $(abspath $(PYTHON)) -m pytest -q -x --tb=short -rN @experiments/exercise_stage$$stage.txt || \
			{ echo "Stage $$stage is red; experiments/exercise.md says what it asks."; exit 1; }; \
		echo "Stage $$stage is green."; \
	done; echo "All three stages are green: your compute_loss does all that the project's own does."

# These files remember that .venv has the versions of the lock.
.venv/installed: requirements.txt $(LOCK)
	$(VENV)
	$(INSTALL) -r requirements.txt || $(NO_INDEX)
	touch $@

.venv/installed-dev: requirements.txt pyproject.toml $(LOCK)
	$(VENV)
	$(INSTALL) -r requirements.txt --group dev || $(NO_INDEX)
	touch .venv/installed $@

# CUDA's packages are left out of the lock: each build of torch asks for its own.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		requirements.txt --group dev | grep -vE "^(cuda|nvidia|triton)" > $(LOCK).new
	mv $(LOCK).new $(LOCK)
