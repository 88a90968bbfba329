"""The loop: draft, verify, commit. Scheduler and slots, batches, prefills and rounds, readback, choice of K."""
