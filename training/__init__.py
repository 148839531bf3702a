"""A training run: the object Run, the steps that scripts share, metrics, logs, checkpoints."""
