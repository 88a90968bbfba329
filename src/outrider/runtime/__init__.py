"""Running a model: forward passes, the key-value cache, and the executions of a step."""
