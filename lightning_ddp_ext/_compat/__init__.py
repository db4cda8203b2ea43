"""The only place for private names of Lightning, torch and torchmetrics; `tests/compat` fails when one moves."""
