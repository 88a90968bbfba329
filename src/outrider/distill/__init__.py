"""Train a draft for a target."""
