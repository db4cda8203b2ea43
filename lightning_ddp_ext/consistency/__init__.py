"""Comparison of settings, parameters and training state between ranks. Plain torch: never imports Lightning."""
