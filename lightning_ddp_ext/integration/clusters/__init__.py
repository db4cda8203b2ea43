"""Who starts the processes, and how they find each other."""
