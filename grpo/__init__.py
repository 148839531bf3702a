"""What one reads later: the run and its checkpoints, sampling, and what the logs tell."""
