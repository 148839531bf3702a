"""Read the answer in a text, and decide whether it equals the gold answer."""
