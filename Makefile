# make demo       install, train the built-in tiny model with GRPO, plot the run
# make test       install, lint, run the tests (under three minutes on 2 cores)
# make test-slow  the tests that take longer (under fifteen minutes)
# make lint       what ruff finds; make format: let ruff lay the code out
# make exercise   a copy of the repository in output/exercise whose compute_loss is yours to write
# make test-exercise   judge it: red before, green when it is right
PYTHON = .venv/bin/python
DEMO = output/demo
# Two workers of one thread each, which is faster than one of two.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist worksteal

.PHONY: demo test test-slow lint format exercise test-exercise
demo: .venv/installed
	@if [ -e $(DEMO) ]; then old=$(DEMO)-$$(date +%Y%m%d-%H%M%S); mv $(DEMO) $$old; echo "the last demo is now in $$old"; fi
	$(PYTHON) main.py --model_name tiny/1m --dataset_name arithmetic --output_dir $(DEMO) --num_train_iters 80 \
		--rollout_batch_size 128 --max_completion_length 96 --learning_rate 1e-4 --micro_batch_tokens 4096 \
		--eval_iterations 20 --save_iterations 80 $(DEMO_FLAGS)
	$(PYTHON) plotter.py --log_dir $(DEMO)

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
	$(PYTHON) experiments/make_exercise.py

test-exercise:
	cd output/exercise && $(abspath $(PYTHON)) -m pytest -q tests/test_loss.py

.venv/installed: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(PYTHON) -m pip install -r requirements-dev.txt
	touch $@
