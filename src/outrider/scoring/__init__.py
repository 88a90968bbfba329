"""Texts that are there already, scored by models: teacher forcing and alpha."""
