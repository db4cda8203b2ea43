"""Buffers made equal on all ranks, together with the gradients."""
