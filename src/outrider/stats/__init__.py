"""Intervals, closed forms, counts and tests. Numbers in, numbers out."""
