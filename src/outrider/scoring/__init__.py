"""Existing texts scored by models: teacher forcing and alpha."""
