"""Exact resuming: RNG state, also at each batch fetched ahead, preemption, and checkpoint files."""
