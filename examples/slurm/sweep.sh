#!/bin/bash
# One job of two nodes for each learning rate. Started on the login node, with the extra `slurm`, it waits for the jobs.
export SLURM_KILL_BAD_EXIT=1  # what -K1 is for srun
exec lightning-ddp-ext --multirun hydra/launcher=submitit_slurm \
    hydra.launcher.nodes=2 hydra.launcher.tasks_per_node=1 hydra.launcher.timeout_min=30 \
    cluster=slurm strategy=ddp_join network=auto trainer.devices=1 \
    model.learning_rate=0.001,0.002 "$@"
