"""Mechanisms that need the Trainer or a LightningModule."""
