"""Choosing the network that processes talk over; nothing here imports Lightning."""
