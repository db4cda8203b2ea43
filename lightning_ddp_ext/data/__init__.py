"""Samplers and loaders for ranks with different amounts of data, plain torch."""
