"""Models and data of the command's default runs (extra `demo`): real data that packages ship, nothing is downloaded."""
