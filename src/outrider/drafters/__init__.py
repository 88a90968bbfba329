"""What proposes tokens: a small model, a look-up in the text itself, or nothing."""
