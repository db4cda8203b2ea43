"""Chunk sizes, batches cut into chunks, and weights of batches. Plain torch: never imports Lightning."""
