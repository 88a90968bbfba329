"""Products of few rows, attention of few queries and narrow weights, compiled for this processor."""
