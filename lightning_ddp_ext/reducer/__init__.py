"""Gradients and buffers synchronised over ranks, for any backward pass. Plain torch: never imports Lightning."""
