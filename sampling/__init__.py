"""Sampling: the loop, the decode step, and Rollout, which holds the completions."""
