"""Exact resuming: RNG state, the position in the data, batches fetched ahead, preemption, and checkpoint files."""
