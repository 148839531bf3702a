"""The loop around the iterations of a script: when it evaluates, saves, and stops for a signal."""

from collections.abc import Iterator

from tqdm import tqdm

import distributed
import signals
from config import OutputConfig
from training.checkpoints import read_evaluations
from training.completions import evaluate
from training.run import Run, check_in_place, save_checkpoint


def iterations(
    config: OutputConfig, run: Run, evaluate_every: int, save_every: int
) -> Iterator[int]:
    """The numbers of the iterations that are left. The caller makes and finishes each of them.

    The model is evaluated before the first iteration, after the last one, and once every so many;
    and it is saved in the same way, but not before the first. Between iterations a signal may stop
    the run.
    """

    def is_due(every: int) -> bool:
        return run.iteration % every == 0 or run.iteration == run.num_iterations

    if is_due(evaluate_every):
        evaluate_once(config, run)
    bar = tqdm(
        range(run.iteration + 1, run.num_iterations + 1),
        initial=run.iteration,
        total=run.num_iterations,
        unit="iteration",
        dynamic_ncols=True,
        # None: only on a terminal. In a file, a line of each iteration says what is left.
        disable=None if distributed.is_main() else True,
    )
    for iteration in bar:
        signals.stop_together_if_asked()
        yield iteration
        check_in_place(config, run)
        signals.stop_together_if_asked()
        if is_due(evaluate_every):
            evaluate_once(config, run)
        if is_due(save_every):
            save_checkpoint(config, run)


def evaluate_once(config: OutputConfig, run: Run) -> None:
    """All: evaluate, unless the log has an evaluation of this step already.

    It may have one in a resumed run, or where an expert iteration has found nothing to learn from.
    """
    evaluated_steps = []
    if distributed.is_main():
        evaluated_steps = [row["step"] for row in read_evaluations(config.output_dir)]
    if distributed.from_main(run.step not in evaluated_steps):
        evaluate(config, run)
