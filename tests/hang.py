"""How long a test waits for another process or thread before it calls that a hang."""

HANG_S = 900
"""Far above what any of them takes, also on a machine where twenty others want each core."""
