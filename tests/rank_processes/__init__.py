"""Tests of `tests.support.rank_processes`."""
