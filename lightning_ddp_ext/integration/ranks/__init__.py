"""A training run on several ranks: its steps, its interruptions and its end."""
