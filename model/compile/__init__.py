"""A traced network, cut at its attention and compiled."""
