"""Text to tokens and back, stop strings, streaming."""
