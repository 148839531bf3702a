"""How a run lives: its record, logs, checkpoints, signals, guards, and the processes that it runs on."""
