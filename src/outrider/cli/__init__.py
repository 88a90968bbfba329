"""The command line: parse, call, render. No command imports torch before it has to."""
