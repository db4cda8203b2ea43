"""Mechanisms that need the Trainer or a LightningModule.

replicas/     a training step on several replicas, its logs and metrics: `balanced_dp`
ranks/        a training run on several ranks, its steps, its interruptions and its end
lockstep/     ranks with different amounts of data in the loops of a Trainer: `ddp_join`
clusters/     who starts the processes, and how they find each other
checkpoints/  checkpoints written whole, and read without running code
"""
