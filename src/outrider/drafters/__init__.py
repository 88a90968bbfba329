"""Drafters: a small model, prompt look-up, or none."""
