"""Families of models: what their files state, and the plans that follow."""
