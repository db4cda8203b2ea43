"""Torch-level mechanisms; nothing here imports Lightning."""
