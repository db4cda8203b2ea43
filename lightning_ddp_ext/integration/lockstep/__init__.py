"""Ranks with different amounts of data in the loops of a Trainer: for `ddp_join`."""
