"""Operations on recurrent states on a CPU; `slots` is what they share."""
