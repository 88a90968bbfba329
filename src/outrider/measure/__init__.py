"""From a text or a log to tau, alpha and seconds: scoring, replay, timing, prediction, and their intervals."""
