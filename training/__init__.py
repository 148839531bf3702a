"""How a training run lives: its record, shared steps, metrics, logs, checkpoints, signals, lock."""
