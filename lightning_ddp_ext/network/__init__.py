"""Finding the other processes of a run, and the network to talk to them over; nothing here imports Lightning.

`process_group.init_process_group` is the way in. It goes through the other files in this order:

    backends.py       is the back-end part of this torch, and does the launcher fit? (before any process starts)
    init_method.py    where ranks meet: an address, torchrun's store, or a file
    port_search.py    at another port, if that one is taken
    stores.py         opening that meeting place in bounded time
    meeting_file.py   a file as the meeting place
    roll_call.py      ranks tell rank 0 who and where they are, and get the same table back
    choosing.py       which interface and address a host contributes
    reachability.py   does every host reach every other one there?
    pinning.py        telling the back-ends, in each one's own syntax

Before and beside it:

    ports.py             is a port of this host free, and who has it?
    slurm_arithmetic.py  has SLURM started what a run needs? (from the environment alone)
    slurm_ports.py       where the ranks of a SLURM step meet
    reports.py           what ranks say about their hosts, collected by rank 0
    skew.py              how far clocks are apart
    bandwidth.py         how fast a process group adds up tensors

While a run goes on:

    watching/            are all ranks alive, do they go on, and what is said if not
"""
