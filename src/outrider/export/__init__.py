"""Export of a pair to other inference engines: checks, acceptance rules, configurations, GGUF files."""
