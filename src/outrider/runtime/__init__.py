"""Running a model: forward passes, the key-value cache, and the ways to execute a step."""
