"""Command line: parse, call, render. No command imports torch before it has to."""
