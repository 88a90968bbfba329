"""Scoring of existing texts: teacher forcing and alpha."""
