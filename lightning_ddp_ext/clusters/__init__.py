"""Launchers: SLURM, processes started by hand, and the process-group settings of a run."""
