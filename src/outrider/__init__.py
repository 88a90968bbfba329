"""Outrider: speculative sampling for Hugging Face causal language models."""
