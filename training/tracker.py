"""Hands each line of the logs to TensorBoard or Weights & Biases as well (--report_to), for those who have them."""

from importlib import import_module

from tqdm import tqdm

TRACKERS = {}  # {output directory: the tracker of its run; None: it has failed}


def report(args, log, row):
    """Send the numbers of a line. Whatever goes wrong is said once, and the run goes on without the tracker."""
    folder, step, is_wandb = args.output_dir, row["step"], args.report_to == "wandb"
    numbers = {
        f"{log}/{key}": value for key, value in row.items() if isinstance(value, int | float)
    }
    try:
        if folder not in TRACKERS and is_wandb:
            known, config = (
                folder / "wandb_run",
                {key: str(value) for key, value in vars(args).items()},
            )
            names = {
                "project": "grpo-lite",
                "name": folder.name,
                "dir": folder,
                "config": config,
                "resume": "allow",
            }
            before = known.read_text() if args.resume and known.exists() else None
            TRACKERS[folder] = import_module("wandb").init(id=before, **names)
            known.write_text(TRACKERS[folder].id)
        elif (
            folder not in TRACKERS
        ):  # purge_step: what a resumed run takes again replaces what is there
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            TRACKERS[folder] = writer(folder / "tensorboard", purge_step=step)
        tracker = TRACKERS[folder]
        if tracker and is_wandb:
            tracker.log(numbers, step=step)
        elif tracker:
            for name, value in numbers.items():
                tracker.add_scalar(name, value, step)
            tracker.flush()
    except Exception as error:
        TRACKERS[folder] = None
        tqdm.write(
            f"warning: --report_to {args.report_to} has failed and is left out from now on: {error!r}"
        )
