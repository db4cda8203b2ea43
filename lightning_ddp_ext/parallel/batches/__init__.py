"""Batches cut into parts, what each part counts, and outputs put together again."""
