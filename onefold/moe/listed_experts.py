"""Expert layers whose experts are modules in a ModuleList.

[Note: two runs of a forward]
A forward that loops over a list of experts calls each with the rows of its tokens. It needs a result before the loop
continues, but tokens can be sent only when all of them are known. The forward therefore runs twice. In the first run,
each call of an expert records its rows and returns zeros. The ranks then exchange the rows, compute them and exchange
the results. In the second run, the same calls return these results. Other children of the layer, such as a router and
shared experts, compute in the first run, and return the same outputs in the second. The second run draws the same
random numbers as the first: it starts from the same state of the generators, and a call of a child sets the state that
the child left. At the end, the generators have the state after the draws of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.token_exchange import Arriving, TokenExchange


@dataclass
class _Recorded:
    """The calls of children in the first run, in their order."""

    devices: set[torch.device]
    experts: list[tuple[int, Tensor]] = field(default_factory=list)
    """The expert, and its rows."""
    others: list[tuple[str, Any, list[int], _RandomState]] = field(default_factory=list)
    """The child, its output, the versions of the tensors in it, and the state of the generators after the call."""


class ListedExperts:
    """The forward of a layer with a list of experts, of which each rank computes its own."""

    def __init__(self, layer: ExpertLayer, exchange: TokenExchange, forward: Callable[..., Any]) -> None:
        self._layer, self._exchange, self._forward = layer, exchange, forward
        self._is_compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = _Recorded({each.device for each in tensors})
        start = _RandomState(found.devices)
        with self._replaced(_FirstRun(self._layer.name, found)):
            # A forward may write to its arguments.
            copied_args, copied_kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            self._forward(*copied_args, **copied_kwargs)
        results, leftover = self._compute(found.experts, tensors)
        end = _RandomState(found.devices)
        start.restore()
        replay = _SecondRun(self._layer.name, found, results, compares=not self._is_compared)
        with self._replaced(replay):
            output = self._forward(*args, **kwargs)
        replay.check_end()
        end.restore()
        self._is_compared = True
        if leftover is not None:  # backward sends gradients for the experts of this rank, although it has no tokens
            return tree_map_only(Tensor, lambda each: each + leftover if each.is_floating_point() else each, output)
        return output

    def _compute(self, calls: list[tuple[int, Tensor]], tensors: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return the results of the calls. If there are none, return a zero whose backward exchanges gradients."""
        places = sorted(range(len(calls)), key=lambda place: calls[place][0])
        flat = [calls[place][1].reshape(-1, calls[place][1].shape[-1]) for place in places]
        counts = [0] * (self._layer.num_experts + 1)
        for place, rows in zip(places, flat, strict=True):
            counts[calls[place][0]] += len(rows)
        if flat:
            rows = torch.cat(flat)
        else:
            token = next(each for each in tensors if each.is_floating_point())
            rows = token.reshape(-1, token.shape[-1])[:0]
        trains = rows.requires_grad or any(each.requires_grad for each in self._layer.module.parameters())
        returned = self._exchange.compute(rows, counts, 0, trains, self._compute_own)
        if not flat:
            return [], returned.sum() if returned.requires_grad else None
        results: list[Tensor] = [rows] * len(calls)
        for place, part in zip(places, returned.split([len(each) for each in flat]), strict=True):
            results[place] = part.view(calls[place][1].shape)
        return results, None

    def _compute_own(self, arrived: Tensor, arriving: Arriving) -> Tensor:
        """Apply this rank's experts to the rows that have arrived, which are sorted by rank, then by expert."""
        num_own, num_ranks = self._exchange.num_own, len(arriving)
        pieces = arrived.split([count for counts in arriving for count in counts])
        outputs, experts = [], list(self._layer.experts)
        for own in range(num_own):
            rows = torch.cat(pieces[own::num_own])
            output = experts[self._exchange.first_own + own](rows)
            if not isinstance(output, Tensor) or output.shape != rows.shape:
                kind = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ValueError(
                    f"expert parallelism: an expert of {self._layer.name} returned {kind} for rows of shape "
                    f"{tuple(rows.shape)}. Return one row for each, or set onefold.expert_parallel_size to 1."
                )
            outputs.append(output.split([counts[own] for counts in arriving]))
        return torch.cat([outputs[own][rank] for rank in range(num_ranks) for own in range(num_own)])

    @contextmanager
    def _replaced(self, run: _FirstRun | _SecondRun) -> Iterator[None]:
        """Replace the experts, and other children of the layer, while its forward runs."""
        module, experts = self._layer.module, self._layer.experts
        tables: list[tuple[nn.Module, dict[str, nn.Module | None]]] = [
            (experts, {name: run.expert(int(name), each) for name, each in experts.named_children()})
        ]
        if experts is not module:
            children = module._modules.items()
            others = {
                name: each if each is None or each is experts else run.other(name, each) for name, each in children
            }
            tables.append((module, others))
        before = [owner._modules for owner, _ in tables]
        try:
            for owner, table in tables:
                owner.__dict__["_modules"] = table
            yield
        finally:
            for (owner, _), original in zip(tables, before, strict=True):
                owner.__dict__["_modules"] = original


class _Child(nn.Module):
    """A module in the place of another one, whose attributes it has."""

    def __init__(self, original: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_original"], self.__dict__["_call"] = original, call
        self.training = original.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](*args, **kwargs)


class _FirstRun:
    """The first run: experts record their rows, and other children compute."""

    def __init__(self, layer: str, found: _Recorded) -> None:
        self._layer, self._found = layer, found

    def expert(self, number: int, original: nn.Module) -> nn.Module:
        def record(*args: Any, **kwargs: Any) -> Tensor:
            (rows,) = args if len(args) == 1 and not kwargs else (None,)
            if not isinstance(rows, Tensor):
                raise ValueError(
                    f"expert parallelism: {self._layer} calls its experts with other arguments than one tensor of "
                    "rows. Set onefold.expert_parallel_size to 1."
                )
            self._found.experts.append((number, rows))
            return torch.zeros_like(rows)

        return _Child(original, record)

    def other(self, name: str, original: nn.Module) -> nn.Module:
        def compute(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self._found.others.append((name, output, _versions(output), _RandomState(self._found.devices)))
            return output

        return _Child(original, compute)


class _SecondRun:
    """The second run: experts return their results, and other children what they have computed."""

    def __init__(self, layer: str, found: _Recorded, results: list[Tensor], *, compares: bool) -> None:
        self._layer, self._compares = layer, compares
        self._experts = iter(zip(found.experts, results, strict=True))
        self._others = iter(found.others)

    def expert(self, number: int, original: nn.Module) -> nn.Module:
        def replay(rows: Tensor) -> Tensor:
            (expected, recorded), result = next(self._experts, ((-1, rows), rows))
            is_same_call = expected == number and recorded.shape == rows.shape
            if is_same_call and self._compares and not rows.is_meta:  # NaN is equal to NaN here
                is_same_call = torch.allclose(recorded, rows, rtol=0, atol=0, equal_nan=True)
            if not is_same_call:
                self._raise()
            return result

        return _Child(original, replay)

    def other(self, name: str, original: nn.Module) -> nn.Module:
        def replay(*args: Any, **kwargs: Any) -> Any:
            expected, output, versions, random = next(self._others, ("", None, [], None))
            if expected != name or versions != _versions(output):
                self._raise()
            assert random is not None
            random.restore()
            return output

        return _Child(original, replay)

    def check_end(self) -> None:
        """Raise if there were fewer calls than in the first run."""
        if next(self._experts, None) is not None or next(self._others, None) is not None:
            self._raise()

    def _raise(self) -> None:
        raise RuntimeError(
            f"expert parallelism: the forward of {self._layer} calls its experts in another way if it runs again with "
            "the same input, because it changes state, or because the rows of an expert depend on results of others. "
            "Set onefold.expert_parallel_size to 1."
        )


def _versions(output: Any) -> list[int]:
    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return [0 if each.is_inference() else each._version for each in tensors]


class _RandomState:
    """The state of the random number generators of the CPU and of other devices."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._host = torch.get_rng_state()
        others = (device for device in devices if device.type not in ("cpu", "meta"))
        self._states = {device: torch.get_device_module(device).get_rng_state(device) for device in others}

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        for device, state in self._states.items():
            torch.get_device_module(device).set_rng_state(state, device)
