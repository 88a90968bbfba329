"""HTML pages in one file, with figures, without scripts and requests: what those of several commands share."""
