"""`python -m model.bench`: requests served and timed, beside Transformers' own ways to generate."""
