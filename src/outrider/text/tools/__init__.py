"""Calls of tools: their formats in a model's text, as parsers and as constraints."""
