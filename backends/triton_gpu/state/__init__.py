"""Operations on recurrent states on a GPU."""
