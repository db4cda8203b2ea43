"""Whether all ranks of a run are alive and go on, and what is said if not; `run_watch.RunWatch` is the way in."""
