"""Programs compiled ahead of time and CUDA graphs: prepared, cached and run."""
