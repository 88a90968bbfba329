"""The race between plain and speculative decoding: its events and its page."""
