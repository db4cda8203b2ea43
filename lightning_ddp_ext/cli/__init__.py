"""The command `lightning-ddp-ext`."""
