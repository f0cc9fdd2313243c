"""Calls in chunks of the batch: outputs and gradients of the whole call, the memory of one chunk."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from onefold.runtime.chunked_call import ChunkedCall, cut_sizes

WIDTH, BATCH, LENGTH = 6, 7, 5


class Layer(nn.Module):
    """A layer with a table, a mask and a scalar, which returns a dict of what most layers return."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.unused = nn.Linear(2, 2)
        self.dropout = dropout
        self.sizes: list[int] = []

    def forward(self, h: torch.Tensor, table: torch.Tensor, *, mask: Any = None, scale: float = 1.0) -> Any:
        self.sizes.append(len(h))
        found = torch.tanh(self.up(h + table)) * scale
        if mask is not None:
            found = found * mask["keep"]
        found = F.dropout(found, self.dropout)
        return {"hidden": h + self.down(found), "more": (found.sum(2), None), "chosen": found.argmax(2), "flag": True}


def arguments(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    table = torch.randn(LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    keep = (torch.rand(BATCH, LENGTH, 1) > 0.3).to(dtype)
    return (hidden, table), {"mask": {"keep": keep}, "scale": 0.5}


def layer(**more: Any) -> Layer:
    torch.manual_seed(2)
    return Layer(**more)


def in_chunks(module: nn.Module, number: int, args: Any, kwargs: Any, inspect: Any = None) -> Any:
    call = ChunkedCall("layer", module.forward, args, kwargs)
    return call.run(number, ChunkedCall.inputs_of(args, kwargs), list(module.parameters()), inspect)


def gradients(module: nn.Module, args: Any, output: Any) -> list[torch.Tensor | None]:
    loss = output["hidden"].square().sum() + output["more"][0].sin().sum()
    return list(torch.autograd.grad(loss, [*args, *module.parameters()], allow_unused=True))


@pytest.mark.parametrize("number", [1, 2, 3, 7, 20])
def test_outputs_and_gradients_are_those_of_the_whole_batch(number):
    module, (args, kwargs) = layer(), arguments()
    expected, module.sizes = module(*args, **kwargs), []
    found = in_chunks(module, number, args, kwargs)
    assert module.sizes == cut_sizes(BATCH, number)
    assert found["flag"] is True
    assert found["more"][1] is None
    torch.testing.assert_close(found["hidden"], expected["hidden"])
    torch.testing.assert_close(found["more"][0], expected["more"][0])
    assert torch.equal(found["chosen"], expected["chosen"])
    module.sizes.clear()
    torch.testing.assert_close(gradients(module, args, found), gradients(module, args, expected))
    assert module.sizes == cut_sizes(BATCH, number)  # one recomputation each


def test_sizes_differ_by_at_most_one():
    assert cut_sizes(7, 3) == [3, 2, 2]
    assert cut_sizes(8, 4) == [2, 2, 2, 2]
    assert cut_sizes(2, 5) == [1, 1]


def test_gradients_add_in_fp32():
    """A thousand chunks whose gradients vanish beside the first one, if they are added in bf16."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    hidden = torch.full((1001, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 1
    call = ChunkedCall("layer", lambda h: h * weight, (hidden,), {})
    (found,) = torch.autograd.grad(call.run(1001, [hidden], [weight]).sum(), [weight])
    assert found.dtype is torch.bfloat16
    assert found.item() == pytest.approx(1 + 1000 / 256, rel=2**-8)


def test_gradients_of_shared_inputs_add_in_fp32():
    table = torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.full((1001, 3, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 1
    call = ChunkedCall("layer", lambda h, t: h * t, (hidden, table), {})
    (found,) = torch.autograd.grad(call.run(1001, [hidden, table], []).sum(), [table])
    assert found.flatten().tolist() == pytest.approx([1 + 1000 / 256] * 3, rel=2**-8)


def test_a_gradient_that_two_parameters_share_is_added_once_to_each():
    one, two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    hidden = torch.randn(6, 4, requires_grad=True)
    call = ChunkedCall("layer", lambda h: h * (one + two), (hidden,), {})
    found = torch.autograd.grad(call.run(3, [hidden], [one, two]).sum(), [one, two])
    for gradient in found:
        torch.testing.assert_close(gradient, hidden.detach().sum(0))


def test_hooks_of_a_parameter_are_called_once_with_the_whole_gradient():
    module, (args, kwargs) = layer(), arguments()
    (whole,) = torch.autograd.grad(module(*args, **kwargs)["hidden"].sum(), [module.up.weight])
    calls: list[torch.Tensor] = []
    handle = module.up.weight.register_hook(lambda gradient: [calls.append(gradient), gradient / 2][1])
    for _ in range(2):
        (found,) = torch.autograd.grad(in_chunks(module, 3, args, kwargs)["hidden"].sum(), [module.up.weight])
        torch.testing.assert_close(found, whole / 2)
    assert len(calls) == 2
    handle.remove()
    (found,) = torch.autograd.grad(in_chunks(module, 3, args, kwargs)["hidden"].sum(), [module.up.weight])
    torch.testing.assert_close(found, whole)


def test_dropout_has_the_same_mask_in_forward_and_backward():
    module, (args, kwargs) = layer(dropout=0.5), arguments()
    torch.manual_seed(7)
    found = in_chunks(module, 3, args, kwargs)["more"][0]
    state = torch.get_rng_state()
    kept = torch.autograd.grad(found.sum(), [module.up.bias])[0]
    assert torch.equal(torch.get_rng_state(), state)  # backward draws from its own copy of the state
    torch.manual_seed(7)
    expected = torch.zeros_like(kept)
    for start, size in ((0, 3), (3, 2), (5, 2)):
        mask = {"keep": kwargs["mask"]["keep"][start : start + size]}
        part = module(args[0][start : start + size], args[1], mask=mask, scale=0.5)["more"][0]
        torch.testing.assert_close(part, found[start : start + size])
        expected += torch.autograd.grad(part.sum(), [module.up.bias])[0]
    torch.testing.assert_close(kept, expected)


def test_autocast_is_restored_in_backward_and_its_cache_keeps_no_cast_without_a_graph():
    module, (args, kwargs) = layer(), arguments()
    dtypes: list[torch.dtype] = []
    module.up.register_forward_hook(lambda _module, _args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = in_chunks(module, 2, args, kwargs)
        assert module.up(args[0]).requires_grad
    gradients(module, args, found)
    assert dtypes == [torch.bfloat16] * 5


def test_no_graph_is_made_without_gradients():
    module, (args, kwargs) = layer(), arguments()
    with torch.no_grad():
        expected = module(*args, **kwargs)["hidden"]
        torch.testing.assert_close(in_chunks(module, 3, args, kwargs)["hidden"], expected)
    with torch.inference_mode():
        torch.testing.assert_close(in_chunks(module, 3, args, kwargs)["hidden"], expected)


class Saved(NamedTuple):
    """Storages that a graph has saved."""

    sizes: Counter[int]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes[tensor.numel()] += 1
        return tensor


def test_only_the_inputs_are_saved():
    module, (args, kwargs) = layer(), arguments()
    saved = Saved(Counter())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        in_chunks(module, 3, args, kwargs)
    assert saved.sizes == Counter([BATCH * LENGTH * WIDTH, LENGTH * WIDTH, BATCH * LENGTH])


def test_a_checkpoint_around_the_call_recomputes_nothing():
    module, (args, kwargs) = layer(), arguments()
    found = checkpoint(lambda *given: in_chunks(module, 2, given, kwargs), *args, use_reentrant=False)
    plain = gradients(module, args, module(*args, **kwargs))
    module.sizes.clear()
    torch.testing.assert_close(gradients(module, args, found), plain)
    assert module.sizes == [4, 3]


def test_a_second_derivative_is_refused():
    module, (args, kwargs) = layer(), arguments()
    hidden = in_chunks(module, 2, args, kwargs)["hidden"]
    (found,) = torch.autograd.grad(hidden.square().sum(), [args[0]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


class DynamicCache:
    """Under the name of a class of transformers."""


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (lambda h: h.add_(1), {}, "layer changes one of its arguments in place"),
        (lambda h: h.sum(), {}, r"layer returns a tensor of shape \[\] for 4 samples. It has no batch dimension"),
        (lambda h: {h.shape[0]: h}, {}, "layer returns outputs of different structures"),
        (lambda h: type("Box", (), {"found": None, "__init__": lambda me: setattr(me, "found", h)})(), {}, "a Box"),
        (lambda h, past: h, {"past": DynamicCache()}, "layer is called with a DynamicCache"),
        (lambda h, past: h, {"past": type("Held", (), {})()}, None),
    ],
)
def test_calls_that_cannot_be_divided_are_refused(function, given, message):
    hidden = torch.randn(7, 3, requires_grad=True) * 1
    if message is None:
        ChunkedCall("layer", function, (hidden,), given).run(2, [hidden], [])
        given["past"].values = torch.zeros(7, 2)
        message = "layer is called with a Held"
    with pytest.raises(RuntimeError, match=message):
        ChunkedCall("layer", function, (hidden,), given).run(2, [hidden], [])


def test_a_table_with_as_many_rows_as_samples_is_not_divided_after_another_call():
    """In chunks of one sample, a row of the table would be broadcast over the positions."""
    tables: set[tuple[int, ...]] = set()
    for batch, length in ((2, 5), (5, 5)):
        hidden, table = torch.randn(batch, length, 3), torch.randn(length, 3)
        call = ChunkedCall("layer", lambda h, t: h * t, (hidden, table), {}, tables)
        assert torch.equal(call.run(batch, [hidden, table], []), hidden * table)


def test_a_mask_of_one_row_may_have_a_row_for_each_sample_in_another_call():
    tables: set[tuple[int, ...]] = set()
    for rows in (1, 4):
        hidden, mask = torch.randn(4, 3), torch.randn(rows, 3)
        call = ChunkedCall("layer", lambda h, m: h * m, (hidden, mask), {}, tables)
        assert torch.equal(call.run(2, [hidden, mask], []), hidden * mask)


def test_a_call_without_a_batch_is_refused():
    with pytest.raises(RuntimeError, match="layer has no floating-point tensor with a batch dimension"):
        ChunkedCall("layer", lambda tokens: tokens, (torch.zeros(4, 3, dtype=torch.long),), {})
