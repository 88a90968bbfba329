"""Export of a pair to other inference engines: checks, acceptance criteria, configurations, GGUF files."""
