"""Files, caches on disk, and where a result comes from."""
