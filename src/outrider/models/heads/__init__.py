"""Heads: small networks that draft from the hidden states of their target. Their modules, and their checkpoints."""
