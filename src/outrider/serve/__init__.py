"""OpenAI-compatible HTTP server over one engine with continuous batching."""
