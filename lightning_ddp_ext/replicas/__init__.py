"""Replicas of a LightningModule in one process: their threads, and what is merged from them."""
