"""Recorded output of a target, and evaluation of drafts on it."""
