"""Fails when a private name of torch that `_compat` relies on moves."""

import importlib

import pytest
import torch
from torch import nn

from lightning_ddp_ext._compat import torch as compat_torch


def test_parts_of_a_flat_tensor_are_views():
    flat = torch.arange(7.0)
    first, second = compat_torch.views_of(flat, [torch.zeros(2, 3), torch.zeros(())])
    first[1, 2] = second[...] = 9
    assert flat.tolist() == [0, 1, 2, 3, 4, 9, 9]


def test_tensors_are_flattened_whatever_their_strides():
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.tensor(7.0), torch.ones(1, 1).expand(2, 1)]
    assert compat_torch.flatten(tensors).tolist() == [0, 2, 1, 3, 7, 1, 1]


def test_what_torch_is_told_to_ignore_is_found():
    module = nn.Linear(2, 2)
    assert compat_torch.ignored_by_ddp(module) == []
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, {"bias"})
    assert compat_torch.ignored_by_ddp(module) == ["bias"]


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


def test_modules_keep_their_tree_and_hooks_where_expected():
    attributes = nn.Linear(1, 1).__dict__
    assert attributes.keys() >= compat_torch.STRUCTURE
    assert attributes.keys() >= set(compat_torch.HOOKS)


def test_every_batch_normalisation_has_the_same_base():
    layers = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
    assert all(issubclass(layer, compat_torch.BatchNorm) for layer in layers)


def test_many_tensors_are_added_and_copied_in_place():
    targets = [torch.ones(2), torch.zeros(3)]
    compat_torch.add_all_(targets, [torch.ones(2), torch.ones(3)])
    assert [t.tolist() for t in targets] == [[2, 2], [1, 1, 1]]
    compat_torch.copy_all_(targets, [torch.zeros(2), torch.zeros(3)])
    assert [t.sum() for t in targets] == [0, 0]


def test_gradient_hooks_of_parameters_are_recognised():
    plain, hooked, late = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    hooked.register_hook(lambda gradient: None)
    late.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [compat_torch.has_gradient_hooks(p) for p in (plain, hooked, late)] == [False, True, True]


def test_a_hook_that_waits_for_a_gradient_can_be_replaced():
    parameter, seen = nn.Parameter(torch.zeros(1)), []
    assert compat_torch.post_accumulate_hooks(parameter) == {}
    handle = parameter.register_post_accumulate_grad_hook(lambda _: seen.append("first"))
    assert torch.utils.hooks.RemovableHandle.next_id == handle.id + 1
    compat_torch.post_accumulate_hooks(parameter)[handle.id] = lambda _: seen.append("second")
    parameter.sum().backward()
    handle.remove()
    parameter.sum().backward()
    assert seen == ["second"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_optimizers_inside_of_the_backward_pass_are_recognised():
    plain, stepped = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    before = torch.utils.hooks.RemovableHandle.next_id
    optim = importlib.import_module("torch.distributed.optim")  # not before, because it warns
    optim._apply_optimizer_in_backward(torch.optim.SGD, [stepped], {"lr": 0.1})
    assert torch.utils.hooks.RemovableHandle.next_id > before
    assert [compat_torch.steps_in_backward(parameter) for parameter in (plain, stepped)] == [False, True]


def test_the_innermost_hooks_for_saved_tensors_are_found():
    with pytest.raises(RuntimeError, match="no hooks for saved tensors"):
        compat_torch.saved_tensor_hooks()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or 7, lambda handle: handle + 1):
        pack, unpack = compat_torch.saved_tensor_hooks()
    assert (pack("tensor"), packed, unpack(7)) == (7, ["tensor"], 8)


def test_what_compilation_wraps_is_found():
    layer = nn.Linear(2, 2)
    assert compat_torch.uncompiled(layer) is layer
    assert compat_torch.uncompiled(torch.compile(layer, backend="eager")) is layer
    assert compat_torch.called_attribute(layer) == "forward"
    layer.compile(backend="eager")
    assert compat_torch.called_attribute(layer) == "_compiled_call_impl"
    layer.__dict__["_compiled_call_impl"] = lambda inputs: "called"
    assert layer(None) == "called"


def test_a_reference_to_a_storage_keeps_its_address_but_not_its_memory():
    tensor = torch.ones(1000)
    reference = compat_torch.WeakStorage(tensor.untyped_storage())
    assert reference == compat_torch.WeakStorage(tensor[3:].untyped_storage())
    assert not reference.expired()
    del tensor
    assert reference.expired()
    later = [torch.ones(1000) for _ in range(50)]
    assert all(compat_torch.WeakStorage(other.untyped_storage()) != reference for other in later)


def test_the_end_of_a_use_of_the_cache_of_parametrizations_puts_a_new_one_in_its_place():
    before = compat_torch.parametrization_cache()
    assert compat_torch.parametrization_cache() is before
    with nn.utils.parametrize.cached():
        with nn.utils.parametrize.cached():
            pass
        assert compat_torch.parametrization_cache() is before
    assert compat_torch.parametrization_cache() is not before
