"""Operations of sparse attention on a CPU."""
