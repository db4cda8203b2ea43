"""Models and real data that ship with installed packages, for the default runs of the command (extra `demo`)."""
