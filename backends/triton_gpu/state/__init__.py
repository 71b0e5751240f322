"""Operations on recurrent states: one token per sequence, or a few draft tokens.

Read `linear_attention`, then `short_conv`. `slots` is what they share.
"""
