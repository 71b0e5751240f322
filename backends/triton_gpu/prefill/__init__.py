"""Attention of many query tokens for every GPU, and the order in which tiles are worked on."""
