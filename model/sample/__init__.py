"""From logits to the next token: sampling, structured outputs."""
