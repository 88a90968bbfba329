"""Options, output and files that several commands share."""
