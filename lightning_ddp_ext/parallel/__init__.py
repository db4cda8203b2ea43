"""Mechanisms in plain torch; nothing here imports Lightning.

batches/        cutting a batch into parts, what each part counts, putting outputs together again
replicas/       replicas of a module on several devices of one process: `balanced_dp`
gradients/      averaging gradients over ranks while the backward pass runs: `GradientReducer`
buffers/        making the buffers of ranks equal, together with the gradients
recomputation/  activation checkpointing
messages/       what ranks send each other, and which ranks take part: the tail of `ddp_join`
consistency/    whether ranks or replicas have the same, and what differs
"""
