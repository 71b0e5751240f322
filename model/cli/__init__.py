"""The command lines: flags, prompts, reports, exit codes."""
