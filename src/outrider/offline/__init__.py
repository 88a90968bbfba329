"""Long jobs: files of prompts, and the files that their output is written to."""
