"""Process groups, networks, rendezvous, and the watchdog. Plain torch: never imports Lightning."""
