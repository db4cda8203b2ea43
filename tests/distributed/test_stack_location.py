import sys
import threading

from lightning_ddp_ext.distributed.stall_report import describe_main_stack, find_main_thread, find_stack_location


def test_the_main_thread_is_found_from_another_one():
    found = []

    def look():
        found.extend([find_main_thread(), describe_main_stack()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    place, stack = found
    assert place.collective == ""
    assert "test_the_main_thread_is_found_from_another_one (test_stack_location.py:" in place.code
    assert "in test_the_main_thread_is_found_from_another_one\n    thread." in stack


def test_a_function_of_torch_distributed_is_named_with_its_caller():
    frames = {}
    namespace = {"__name__": "torch.distributed.distributed_c10d", "look": lambda: frames.update(f=sys._getframe(1))}
    exec(
        "def all_gather():\n    look()\ndef wrapper():\n    all_gather()\ndef all_gather_object():\n    wrapper()",
        namespace,
    )

    def training_step():
        namespace["all_gather_object"]()

    training_step()
    place = find_stack_location(frames["f"])
    assert place.collective == "all_gather_object"
    assert place.code.startswith("training_step (test_stack_location.py:")
    assert str(place).startswith("all_gather_object <- training_step (")
    assert place.waits


def test_a_thread_waits_for_ranks_only_where_nothing_else_takes_time():
    modules = {
        "torch.distributed.distributed_c10d": True,
        "lightning_ddp_ext.reducer.gradient_reducer": True,
        "torch.distributed.checkpoint.filesystem": False,
        "lightning_ddp_ext.join.lockstep_loader": False,
        "theirs": False,
    }
    for module, waits in modules.items():
        namespace = {"__name__": module, "sys": sys}
        exec("def stay():\n    return sys._getframe()", namespace)
        assert find_stack_location(namespace["stay"]()).waits == waits, module
    assert str(find_stack_location(None)) == ""  # of a thread that has ended
