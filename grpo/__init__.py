"""What one reads later and trusts: the record of a completion, the life of a run, checkpoints."""
