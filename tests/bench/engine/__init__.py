"""The engine in one process: how fast it answers, what its host work costs, what paging saves."""
