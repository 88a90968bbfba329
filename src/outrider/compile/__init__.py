"""Programs compiled ahead of time and CUDA graphs: made, kept and run."""
