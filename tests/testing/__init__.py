"""Tests of `lightning_ddp_ext.testing`."""
