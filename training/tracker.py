"""Sends the lines of the logs to TensorBoard or Weights & Biases as well (--report_to)."""

from dataclasses import asdict
from importlib import import_module

from tqdm import tqdm

from config import OutputConfig

TRACKERS = {}  # {output directory: the tracker of its run, or None after that has failed}


def send(config: OutputConfig, log, row):
    """Send the numbers in a line of a log ("train" or "eval") to the tracker.

    If anything goes wrong, one warning is printed and the run goes on without the tracker.
    """
    folder = config.output_dir
    numbers = {}
    for key, value in row.items():
        if isinstance(value, int | float):
            numbers[f"{log}/{key}"] = value
    try:
        if folder not in TRACKERS:
            TRACKERS[folder] = _start_tracker(config, row["step"])
        if TRACKERS[folder] is not None:
            _send_numbers(TRACKERS[folder], config.report_to, row["step"], numbers)
    except Exception as error:
        TRACKERS[folder] = None
        tqdm.write(
            f"warning: --report_to {config.report_to} has failed, and gets nothing more from this"
            f" run: {error!r}"
        )


def _start_tracker(config, step):
    """A wandb run, or a SummaryWriter of TensorBoard. A resumed run continues its own."""
    folder = config.output_dir
    if config.report_to == "tensorboard":
        tensorboard = import_module("torch.utils.tensorboard")
        # purge_step hides the steps that a resumed run takes again.
        return tensorboard.SummaryWriter(folder / "tensorboard", purge_step=step)
    id_file = folder / "wandb_run"
    run_id = None
    if config.resume and id_file.exists():
        run_id = id_file.read_text()
    wandb_run = import_module("wandb").init(
        project="grpo-lite",
        name=folder.name,
        dir=folder,
        config={name: str(value) for name, value in asdict(config).items()},
        resume="allow",
        id=run_id,
    )
    id_file.write_text(wandb_run.id)
    return wandb_run


def _send_numbers(tracker, report_to, step, numbers):
    if report_to == "wandb":
        tracker.log(numbers, step=step)
        return
    for name, value in numbers.items():
        tracker.add_scalar(name, value, step)
    tracker.flush()
