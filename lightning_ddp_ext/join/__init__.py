"""Training on ranks with different amounts of data: lockstep loading, shadow steps, collectives among active ranks."""
