"""Intervals, closed forms, counts and evidence. Numbers in, numbers out."""
