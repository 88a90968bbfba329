"""Handing a pair over to other inference engines: checks, their laws of acceptance, configurations, GGUF files."""
