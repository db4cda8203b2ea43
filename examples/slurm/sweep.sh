#!/bin/bash
# One job of two nodes for each learning rate. Start it on the login node, with the extra `slurm`; it waits for the jobs.
# Before the time limit submitit sends SIGUSR2: a job saves a checkpoint and is requeued, up to three times.
export SLURM_KILL_BAD_EXIT=1  # like -K1 of srun
exec lightning-ddp-ext --multirun hydra/launcher=submitit_slurm \
    hydra.launcher.nodes=2 hydra.launcher.tasks_per_node=1 hydra.launcher.timeout_min=30 \
    hydra.launcher.max_num_timeout=3 cluster=slurm cluster.requeue_signal=SIGUSR2 \
    strategy=ddp_join network=auto trainer.devices=1 \
    model.learning_rate=0.001,0.002 "$@"
