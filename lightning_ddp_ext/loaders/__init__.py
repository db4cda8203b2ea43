"""The loaders of one rank: their batches are counted, ranks make equally many steps, and an epoch can be resumed."""
