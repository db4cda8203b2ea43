"""Finding the other processes of a run, and the network to talk to them over; nothing here imports Lightning.

`process_group.init_process_group` is the way in. It goes through the other files in this order:

    backends.py       is the back-end part of this torch, and does the launcher fit? (before any process starts)
    init_method.py    where ranks meet: an address, torchrun's store, or a file
    port_search.py    at another port, if that one is taken
    stores.py         opening that meeting place in bounded time
    roll_call.py      ranks tell rank 0 who and where they are, and get the same table back
    choosing.py       which interface and address a host contributes
    reachability.py   does every host reach every other one there?
    pinning.py        telling the back-ends, in each one's own syntax

Under SLURM, `slurm_arithmetic.py` knows whether the right processes have been started, and `slurm_ports.py` where they
meet.
"""
