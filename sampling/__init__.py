"""How completions are sampled: the record of them, and the one decode step."""
