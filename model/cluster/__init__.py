"""Several replicas of an engine behind one server, on Ray Serve."""
