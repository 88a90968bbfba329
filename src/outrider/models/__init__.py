"""Names to checkpoints to models. The only place that loads models."""
