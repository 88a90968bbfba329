"""The race of plain and speculative decoding: its events and its page."""
