"""Paired, interleaved measurement, and what is said of it."""
