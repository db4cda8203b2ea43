"""Fails when a private name of torch moves that `_compat` relies on."""

import importlib
import inspect
import itertools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as torchs

from lightning_ddp_ext._compat import torch as compat_torch
from lightning_ddp_ext.steps.active_collectives import ProcessGroupRedirect


def test_tensors_are_flattened_whatever_their_strides_and_parts_are_views():
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.tensor(7.0), torch.ones(1, 1).expand(2, 1)]
    flat = compat_torch.flatten(tensors)
    assert flat.tolist() == [0, 2, 1, 3, 7, 1, 1]
    first, second, _ = compat_torch.views_of(flat, tensors)
    first[1, 1] = second[...] = 9
    assert flat.tolist() == [0, 2, 1, 9, 9, 1, 1]


def test_each_use_of_a_default_generator_in_this_thread_is_announced():
    calls, own = [], torch.Generator()
    with compat_torch.before_random_numbers(lambda: calls.append(torch.get_rng_state())):
        before = torch.get_rng_state()
        torch.rand(2, generator=own)
        torch.ones(2).exponential_(generator=own)
        torch.arange(6).view(2, 3).float().mean()
        assert calls == []
        for count, draw in enumerate(
            (
                lambda: torch.empty((), dtype=torch.int64).random_(),  # as loaders and samplers do
                lambda: torch.randperm(3),
                lambda: torch.rand(()),
                lambda: torch.ones(3).bernoulli(0.5),
                lambda: nn.functional.dropout(torch.ones(3)),
            ),
            start=1,
        ):
            draw()
            assert len(calls) == count
        thread = threading.Thread(target=torch.rand, args=(2,))
        thread.start()
        thread.join()
    assert len(calls) == 5
    assert torch.equal(calls[0], before)  # before the number is drawn


def test_tensors_count_changes_in_place():
    tensor = torch.zeros(2)
    before = compat_torch.version_of(tensor)
    tensor.add_(1)
    assert compat_torch.version_of(tensor) > before
    with torch.inference_mode():
        inferred = torch.zeros(2)
    assert compat_torch.version_of(inferred) == -1
    assert compat_torch.versions_of([tensor, tensor]) == [compat_torch.version_of(tensor)] * 2
    assert compat_torch.versions_of([tensor, inferred, None]) == [compat_torch.version_of(tensor), -1, 0]
    versions = compat_torch.TensorVersions([tensor, tensor, None, inferred])
    assert versions.changed([tensor, tensor.clone(), None, inferred]) == {1, 3}  # replaced, and without a version
    tensor.add_(1)
    assert versions.changed([tensor, tensor, torch.ones(1), inferred]) == {0, 1, 2, 3}
    assert versions.changed([tensor]) == {0, 1, 2, 3}
    assert compat_torch.TensorVersions([tensor, None]).changed([tensor, None]) == set()


def test_modules_keep_tree_hooks_and_ignored_names_where_expected():
    module = nn.Linear(2, 2)
    assert vars(module).keys() >= compat_torch.STRUCTURE | set(compat_torch.HOOKS)
    assert compat_torch.ignored_by_ddp(module) == []
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, {"bias"})
    assert compat_torch.ignored_by_ddp(module) == ["bias"]
    layers = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
    assert all(issubclass(layer, compat_torch.BatchNorm) for layer in layers)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_hooks_of_gradients_are_recognised_and_replaced():
    plain, hooked, late, stepped = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    seen = []
    hooked.register_hook(lambda gradient: None)
    assert compat_torch.post_accumulate_hooks(late) == {}
    handle = late.register_post_accumulate_grad_hook(lambda _: seen.append("first"))
    assert torch.utils.hooks.RemovableHandle.next_id == handle.id + 1
    assert [compat_torch.has_gradient_hooks(p) for p in (plain, hooked, late)] == [False, True, True]
    compat_torch.post_accumulate_hooks(late)[handle.id] = lambda _: seen.append("second")
    late.sum().backward()
    handle.remove()
    late.sum().backward()
    assert seen == ["second"]
    before = torch.utils.hooks.RemovableHandle.next_id
    optim = importlib.import_module("torch.distributed.optim")  # not before, because it warns
    optim._apply_optimizer_in_backward(torch.optim.SGD, [stepped], {"lr": 0.1})
    assert torch.utils.hooks.RemovableHandle.next_id > before
    assert [compat_torch.steps_in_backward(parameter) for parameter in (plain, stepped)] == [False, True]


def test_a_compiled_module_and_the_end_of_a_parametrization_cache_are_found():
    layer = nn.Linear(2, 2)
    assert compat_torch.uncompiled(layer) is layer
    assert compat_torch.uncompiled(torch.compile(layer, backend="eager")) is layer
    assert compat_torch.called_attribute(layer) == "forward"
    layer.compile(backend="eager")
    assert compat_torch.called_attribute(layer) == "_compiled_call_impl"
    layer.__dict__["_compiled_call_impl"] = lambda inputs: "called"
    assert layer(None) == "called"
    before = compat_torch.parametrization_cache()
    with nn.utils.parametrize.cached():
        with nn.utils.parametrize.cached():
            pass
        assert compat_torch.parametrization_cache() is before
    assert compat_torch.parametrization_cache() is not before


def test_iterators_have_the_names_that_count():
    assert "self._get_iterator()" in inspect.getsource(DataLoader.__iter__)
    for kind in (torchs._SingleProcessDataLoaderIter, torchs._MultiProcessingDataLoaderIter):
        assert "self._next_data()" in inspect.getsource(kind.__mro__[1].__next__)
        assert "_next_data" in vars(kind)
    loader = DataLoader(range(3), 2)
    batches = compat_torch.iterate_counting(loader, lambda samples, batch, batch_size: len(samples))
    assert isinstance(batches._collate_fn, compat_torch._CountingCollate)
    assert isinstance(batches, torchs._SingleProcessDataLoaderIter)
    assert len(next(batches)) == compat_torch.samples_of(batches) == 2


def test_loaders_draw_from_a_replaced_sampler_and_fetchers_iterate_over_the_indices_of_streams():
    seen = []

    class Indices(list):
        def __iter__(self):
            seen.append(len(self))
            return super().__iter__()

    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    def wrap(sampler):
        return [Indices(indices) for indices in itertools.islice(sampler, 3)]

    for given, expected in (
        (DataLoader(range(4), 2), [[0, 1], [2, 3]]),
        (DataLoader(Numbers(), 2), [[0, 1], [2, 3], [4]]),
        (DataLoader(range(2), None), [0, 1]),
    ):
        keep = (lambda sampler: sampler) if given.batch_size is None else wrap
        changed = compat_torch.with_sampler(given, keep, lambda samples: samples)
        assert list(changed) == expected
        assert type(changed) is DataLoader
        assert given.collate_fn is not changed.collate_fn
    assert seen.count(2) >= 5


def test_every_method_of_a_process_group_is_redirected_or_refused_on_purpose():
    refused = {
        "_set_sequence_number_for_group", "_start_coalescing", "all_gather_single_coalesced", "allgather_coalesced",
        "allgather_into_tensor_coalesced", "gather_into_tensor", "gather_single", "get_backend", "merge_remote_group",
        "new_window", "reconfigure", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
        "split_group",
    }  # fmt: skip
    methods = set(compat_torch.find_collectives())
    assert {"allreduce", "_allgather_base", "alltoall"} <= methods
    public = {compat_torch._PUBLIC_NAMES.get(name, name) for name in methods}
    assert public - ProcessGroupRedirect._HANDLERS.keys() - refused == set()


def test_the_store_of_a_group_is_cloned_and_gloo_ignores_an_abort(group):
    """Once gloo aborts collectives, the end of connections in `distributed.backends` is no longer needed."""
    store = compat_torch.cloned_store(group)
    store.set("a", "b")
    assert store.get("a") == b"b"
    assert compat_torch.keeps_store_in_file(dist.PrefixStore("a", store))
    assert not compat_torch.keeps_store_in_file(dist.PrefixStore("a", dist.HashStore()))
    compat_torch.abort_groups()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 1


LOST = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation",
    "NCCL communicator was aborted on rank 0.",
]


def caught(function, *args):
    with pytest.raises(Exception) as raised:  # noqa: PT011  any
        function(*args)
    return raised.value


def fail_in_native_code(text):
    torch._assert_async(torch.tensor(False), text)


def fail_in_python(kind, text):
    raise kind(text)


def fail_in_a_worker(text):
    """As in a worker of a loader, whose error torch raises again in the main process."""
    try:
        raise RuntimeError(text)
    except RuntimeError:
        wrapper = torch._utils.ExceptionWrapper(where="in DataLoader worker process 0")
    wrapper.reraise()


def fail_after(text, keeps_cause):
    try:
        fail_in_native_code(text)
    except RuntimeError as error:
        raise ValueError("evaluation failed") from (error if keeps_cause else None)


def fail_with_context(text):
    try:
        fail_in_native_code(text)
    except RuntimeError:
        fail_in_python(ValueError, "evaluation failed")


class Mute(RuntimeError):
    def __str__(self):
        return self.no_such_attribute


def test_errors_of_communication_are_recognised_by_the_place_where_they_were_raised():
    inside = {"__name__": "torch.distributed.distributed_c10d"}
    exec("def fail(text):\n    raise RuntimeError(text)", inside)
    lost = [caught(fail_in_native_code, text) for text in LOST] + [caught(inside["fail"], text) for text in LOST]
    lost += [caught(fail_after, LOST[0], True), caught(fail_with_context, LOST[0])]
    lost.append(caught(dist.HashStore().wait, ["missing"], timedelta(milliseconds=1)))
    assert isinstance(lost[-1], dist.DistError)
    assert [error for error in lost if not compat_torch.is_lost_connection(error)] == []
    texts = [*LOST, "Connection reset by peer", "Timed out waiting for the database", "boom"]
    own = [caught(fail_in_python, kind, text) for kind in (RuntimeError, ValueError, dist.DistError) for text in texts]
    own += [caught(fail_in_a_worker, text) for text in texts]
    own += [caught(fail_in_native_code, "Broken pipe"), caught(torch.empty, 2**50), caught(fail_after, LOST[0], False)]
    own += [caught(fail_in_python, ConnectionResetError, "Connection reset by peer"), caught(fail_in_python, Mute, "")]
    assert len(own) == 29
    assert [error for error in own if compat_torch.is_lost_connection(error)] == []
