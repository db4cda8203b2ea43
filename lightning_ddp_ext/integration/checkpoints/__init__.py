"""Checkpoints written whole, and read without running code."""
