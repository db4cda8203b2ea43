"""Whether ranks or replicas have the same; if not, what differs."""
