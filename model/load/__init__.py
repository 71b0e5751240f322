"""From a checkpoint to a network that is known to run: files, probes, tokenizer."""
