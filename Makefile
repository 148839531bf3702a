# make demo       install, train the built-in tiny model with GRPO, plot the run
# make test       install, lint, run the tests (under three minutes on 2 cores)
# make test-slow  the tests that take longer (under fifteen minutes)
# make lint       what ruff finds; make format: let ruff lay the code out
# make lock       write requirements.lock anew after a change to requirements.txt or requirements-dev.txt (needs uv)
# make exercise   a copy of the repository in output/exercise whose compute_loss is yours to write
# make test-exercise   judge it in three stages, each when the one before is green
PYTHON = .venv/bin/python
DEMO = output/demo
EXERCISE = output/exercise
# Two workers of one thread each, which is faster than one of two.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist worksteal

# Where there is uv, it installs: many times faster than pip, without python3-venv, and with a Python of its own
# if none here will do. `auto` is the build of torch for this machine's GPU or CPU; `make demo TORCH_BUILD=` leaves
# the choice to the index. That is also tried where PyTorch's own index cannot be reached, and pip where uv fails.
# pip takes the CPU build if README's PIP_EXTRA_INDEX_URL is set.
ifneq ($(shell command -v uv),)
TORCH_BUILD = --torch-backend=auto
MAKE_VENV = [ -x $(PYTHON) ] || uv venv --python ">=3.11,<3.15"
UV = uv pip install --python $(PYTHON)
install = $(UV) $(TORCH_BUILD) $(1) || \
	{ echo "uv has failed; trying without $(TORCH_BUILD)"; $(UV) $(1); } || \
	{ echo "uv has failed; trying pip"; $(PYTHON) -m ensurepip && $(PYTHON) -m pip install $(1); }
else
CHECK_PYTHON = import sys; (3, 11) <= sys.version_info < (3, 15) or sys.exit("error: python3 is " + \
	sys.version.split()[0] + ", but 3.11 to 3.14 is needed; install uv, which brings one, and run make again")
MAKE_VENV = [ -x .venv/bin/pip ] || { python3 -c '$(CHECK_PYTHON)' && python3 -m venv .venv; }
install = $(PYTHON) -m pip install $(1)
endif

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

# These files remember that .venv has the versions of requirements.lock.
.venv/installed: requirements.txt requirements.lock
	@$(MAKE_VENV)
	$(call install,-r requirements.txt -c requirements.lock)
	touch $@

.venv/installed-dev: requirements.txt requirements-dev.txt requirements.lock
	@$(MAKE_VENV)
	$(call install,-r requirements-dev.txt -c requirements.lock)
	touch .venv/installed $@

# Versions stay where they still fit; delete requirements.lock before, and all are the newest. CUDA's packages are
# left out: each build of torch asks for its own.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		--output-file requirements.lock requirements-dev.txt
	grep -vE "^(cuda|nvidia|triton)" requirements.lock > requirements.lock.new
	mv requirements.lock.new requirements.lock
