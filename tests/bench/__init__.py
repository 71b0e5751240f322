"""Every benchmark of the project, by one command line: `python -m tests.bench --help`."""
