"""Task scores, plain and speculative on the same prompts."""
