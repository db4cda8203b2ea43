"""Activation checkpointing of modules, exact with buffers and RNG state. Plain torch: never imports Lightning."""
