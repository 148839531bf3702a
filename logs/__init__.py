"""What logs say: their one format, reading them, and every statistic of the project. Nothing here imports torch."""
