"""Sends the lines of the logs to TensorBoard or Weights & Biases as well (--report_to)."""

from importlib import import_module

from tqdm import tqdm

TRACKERS = {}  # {output directory: the tracker of its run, or None after that has failed}


def report(args, log, row):
    """Send the numbers in a line of a log ("train" or "eval") to the tracker.

    If anything goes wrong, one warning is printed and the run goes on without the tracker.
    """
    folder = args.output_dir
    numbers = {}
    for key, value in row.items():
        if isinstance(value, int | float):
            numbers[f"{log}/{key}"] = value
    try:
        if folder not in TRACKERS:
            TRACKERS[folder] = _start_tracker(args, row["step"])
        if TRACKERS[folder] is not None:
            _send(TRACKERS[folder], args.report_to, row["step"], numbers)
    except Exception as error:
        TRACKERS[folder] = None
        tqdm.write(
            f"warning: --report_to {args.report_to} has failed, and gets nothing more from this"
            f" run: {error!r}"
        )


def _start_tracker(args, step):
    """A wandb run, or a SummaryWriter of TensorBoard. A resumed run continues its own."""
    folder = args.output_dir
    if args.report_to == "tensorboard":
        tensorboard = import_module("torch.utils.tensorboard")
        # purge_step hides the steps that a resumed run takes again.
        return tensorboard.SummaryWriter(folder / "tensorboard", purge_step=step)
    id_file = folder / "wandb_run"
    run_id = None
    if args.resume and id_file.exists():
        run_id = id_file.read_text()
    wandb_run = import_module("wandb").init(
        project="grpo-lite",
        name=folder.name,
        dir=folder,
        config={name: str(value) for name, value in vars(args).items()},
        resume="allow",
        id=run_id,
    )
    id_file.write_text(wandb_run.id)
    return wandb_run


def _send(tracker, report_to, step, numbers):
    if report_to == "wandb":
        tracker.log(numbers, step=step)
        return
    for name, value in numbers.items():
        tracker.add_scalar(name, value, step)
    tracker.flush()
