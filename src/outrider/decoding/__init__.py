"""The loop: draft, verify, commit. Batches, slots, prefill, readback and schedules."""
