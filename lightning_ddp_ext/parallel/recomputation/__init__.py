"""Activations recomputed in the backward pass."""
