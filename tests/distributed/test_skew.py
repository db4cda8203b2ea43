import json
import threading
import time

import torch.distributed as dist

from lightning_ddp_ext.distributed.rank_reports import ask_clock, tell_clock


def asked(answer):
    """What `ask_clock` says when a thread answers."""
    store = dist.HashStore()
    thread = threading.Thread(target=answer, args=(store,))
    thread.start()
    offset = ask_clock(store)
    thread.join(30)
    return offset


def test_one_clock_differs_from_itself_by_no_more_than_the_uncertainty():
    offset = asked(tell_clock)
    assert abs(offset.seconds) <= offset.uncertainty + 1e-3  # the clock may be set while it is read
    assert 0 < offset.uncertainty < 1


def test_a_clock_that_is_ahead_is_found_however_late_it_answers():
    def answer(store):
        for number in range(8):
            store.wait([f"asked/{number}"])
            time.sleep(0.01)
            store.set(f"told/{number}", json.dumps(time.time() + 5))
            time.sleep(0.02)

    offset = asked(answer)
    assert offset.uncertainty >= 0.005
    assert abs(offset.seconds - 5) <= offset.uncertainty + 1e-3
