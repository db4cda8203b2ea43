"""Training steps of one rank under Lightning, shared by `ddp_checkpoint` and `ddp_join`."""
