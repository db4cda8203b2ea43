"""Lightning strategies, one per file; `explicit_ddp` is the base of all with one process per device."""
