"""`python -m lightning_ddp_ext` is the command `lightning-ddp-ext`."""

from lightning_ddp_ext.cli.main import main

if __name__ == "__main__":
    main()
