"""Recorded output of a target, and what drafts would have made of it."""
