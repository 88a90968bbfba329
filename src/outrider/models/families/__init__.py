"""Families of models: what config.json and GGUF files state, and the plans that follow.

Source of what GGUF files state: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python
0.3.36.
"""
