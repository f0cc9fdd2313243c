"""The search for tensors that calls store on modules, and the views of the members of a flat tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onefold.plan.layout import Layout
from onefold.runtime.call_hooks import StoredTensors, stored_tensors
from onefold.runtime.flat_grad import views_of_members
from onefold.runtime.torch_internals import tensors_in


class Early(nn.Module):
    """Has attributes before torch's constructor sets those of every module."""

    def __init__(self) -> None:
        self.early = None
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.last: Any = None
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())


def loss() -> torch.Tensor:
    return torch.ones((), requires_grad=True) * 2


def remove(model: nn.Module) -> None:
    del model.inner.ours
    model.inner.ours = loss()


# Each leaves one more tensor to find, or the same number.
CHANGES: dict[str, Callable[[Any], None]] = {
    "new attribute": lambda model: setattr(model, "new", loss()),
    "attribute that was None": lambda model: setattr(model, "last", loss()),
    "attribute before the constructor": lambda model: setattr(model, "early", loss()),
    "number": lambda model: setattr(model.inner[1], "p", loss()),
    "list": lambda model: model.losses.append(loss()),
    "dictionary": lambda model: setattr(model.inner, "by_name", {"loss": loss()}),
    "module inside": lambda model: setattr(model.inner[0], "loss", loss()),
    "added again": remove,
    "new module": lambda model: model.inner.append(with_loss()),
    "replaced module": lambda model: setattr(model, "inner", with_loss()),
    "module replaced in the table": lambda model: model._modules.update(inner=with_loss()),
    "module in another one": lambda model: model.inner[0].add_module("deeper", with_loss()),
    "removed module": lambda model: setattr(model.inner.pop(0), "loss", loss()),
}


def with_loss() -> nn.Module:
    made = nn.Linear(2, 2)
    made.loss = loss()  # type: ignore[assignment]
    return made


def ids_of_tensors(values: list[Any]) -> set[int]:
    return {id(tensor) for tensor in tensors_in(values)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_search_finds_every_attribute_after_any_change(change):
    model = Early()
    model.inner.ours = loss()
    search = StoredTensors(model)
    assert len(ids_of_tensors(search.find())) == 1
    CHANGES[change](model)
    expected = ids_of_tensors([value for _, value in stored_tensors(model)])
    assert ids_of_tensors(search.find()) == expected
    assert len(expected) == (1 if "removed" in change or "replaced" in change or "again" in change else 2)


@pytest.mark.parametrize(
    "shapes",
    [[(3, 5)], [(256,), (2, 128)], [(300,), (), (7, 1, 3)], [(4, 0), (9,)], [(5,), (0,), (2, 2)], []],
    ids=str,
)
def test_views_are_those_of_each_member(shapes):
    layout = Layout.of([(str(index), shape, index % 2) for index, shape in enumerate(shapes)], num_shards=2)
    flat = torch.arange(layout.total + 1)[1:]
    views = views_of_members(flat, layout)
    assert len(views) == len(layout.members)
    for view, member in zip(views, layout.members, strict=True):
        expected = flat[member.start : member.stop].view(member.shape)
        assert view.shape == expected.shape
        assert view.stride() == expected.stride()
        assert torch.equal(view, expected)
        assert view.untyped_storage()._cdata == flat.untyped_storage()._cdata
