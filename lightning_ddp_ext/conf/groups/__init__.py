"""Copies of the groups strategy, process_group, network and cluster, for the search path of other applications."""
