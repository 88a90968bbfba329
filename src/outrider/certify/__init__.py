"""Certification: tests that the output follows the target's distribution, and controls that validate the tests."""
