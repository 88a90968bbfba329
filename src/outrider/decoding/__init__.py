"""The loop, and all that it keeps of the rows that it writes."""
