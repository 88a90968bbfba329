"""Recorded output of a target, and drafts judged by it."""
