"""Generated hostile requests against a server of its own: `python -m tests.model.serve.hostile`."""
