"""Models in GGUF files: what such a file states is honoured, or the file is refused by name."""
