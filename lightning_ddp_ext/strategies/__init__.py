"""Lightning strategies, one per file."""
