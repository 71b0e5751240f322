"""Attention of few query tokens: sequences cut into parts, which are merged; shared prefixes."""
