"""`balanced_ddp`: shares of a global batch, fetched by the ranks that get them."""
