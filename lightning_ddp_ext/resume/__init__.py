"""Exact resuming: RNG state, the position in the data, preemption, and checkpoint files."""
