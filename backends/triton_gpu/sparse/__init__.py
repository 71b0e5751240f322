"""Operations of sparse attention on a GPU."""
