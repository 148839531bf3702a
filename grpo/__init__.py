"""What one reads later: the run and its checkpoints, sampling, judges, and what the logs tell."""
