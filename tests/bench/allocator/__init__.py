"""`python -m tests.bench allocator`: kvcore's allocator, alone or beside others."""
