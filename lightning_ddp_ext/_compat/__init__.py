"""The only place for private names of Lightning, torch and torchmetrics; `tests/compat` fails when one moves."""

# The function of Lightning that calls every method of a Trainer; here, because the folders of plain torch need it.
TRAINER_CALL = "_call_and_handle_interrupt"
