"""From prompts and options to requests of the loop, and from its rounds to chunks and completions."""
