"""Hands each line of the logs to TensorBoard or Weights & Biases as well (--report_to), for those who have them."""

from tqdm import tqdm

WRITERS = {}  # {output directory: what takes (log, row); None: it has failed}


def report(args, log, row):
    """Whatever goes wrong with a tracker is said once, and the run goes on without it."""
    try:
        if args.output_dir not in WRITERS:
            WRITERS[args.output_dir] = {"tensorboard": tensorboard, "wandb": wandb}[args.report_to](args, row["step"])
        if write := WRITERS[args.output_dir]:
            write({f"{log}/{key}": value for key, value in row.items() if isinstance(value, int | float)}, row["step"])
    except Exception as error:
        WRITERS[args.output_dir] = None
        tqdm.write(f"warning: --report_to {args.report_to} has failed and is left out from now on: {error!r}")


def tensorboard(args, step):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(args.output_dir / "tensorboard", purge_step=step)  # a resumed run takes back what it repeats

    def write(numbers, step):
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return write


def wandb(args, step):
    import wandb

    folder, config = args.output_dir, {key: str(value) for key, value in vars(args).items()}
    name = folder / "wandb_run"  # which a resumed run continues
    known = name.read_text() if args.resume and name.exists() else None
    settings = wandb.Settings(console="off")
    run = wandb.init(project="grpo-lite", name=folder.name, dir=folder, id=known, resume="allow", config=config, settings=settings)
    name.write_text(run.id)
    return lambda numbers, step: run.log(numbers, step=step)
