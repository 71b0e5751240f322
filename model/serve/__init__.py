"""The server: OpenAI's HTTP interface over an asynchronous engine; `python -m model.serve`.

Importing this package loads nothing of it.
"""
