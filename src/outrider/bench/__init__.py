"""Paired, interleaved measurement, its tables and plots."""
