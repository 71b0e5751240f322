"""Operations on recurrent states on a CPU."""
