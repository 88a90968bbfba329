"""The mathematics of sampling: probabilities, acceptance rules, noise. No models, no files."""
