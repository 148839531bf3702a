"""The format of logs, how to read them, and every statistic. Nothing here imports torch."""
