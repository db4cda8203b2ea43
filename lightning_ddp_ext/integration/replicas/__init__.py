"""A training step on several replicas, its logs and metrics: for `balanced_dp`."""
