"""Several replicas of an engine as one: which of them takes a request."""
