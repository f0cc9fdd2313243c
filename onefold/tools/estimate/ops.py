"""The ops of a dry run: the work they do, attention and dropout as on CUDA, and their times on this machine.

[Note: seconds of a pass]
The host launches ops and the GPU runs them, so a pass takes as long as the slower of the two. The GPU's seconds are the
sum over its ops, each of which is run alone on tensors of its shapes. The host's are the number of ops times the
seconds per op of a small model's real step, with Python, autograd and the engine included (`step_bench.py`). On CPU
ranks there are no launches. The time of an op that cannot be run alone is estimated from its bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from onefold.sequence import dispatch

ATTENTION = "flash attention is assumed: the scores are not stored"
# Repetitions of one op, and seconds after which a slow op is not repeated.
_REPEATS, _PATIENCE = 12, 0.1
# Cycles for which the GPU is kept busy, so that ops queue up and the time of launches is hidden.
_SLEEP = 4_000_000


class TensorLike(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device, bound: int) -> torch.Tensor:
        """Return a tensor of this kind. Integers, which may be indices, are below the bound."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point or self.dtype is torch.bool:
            return made.fill_(1e-3)
        values = torch.arange(made.numel(), device=device).remainder_(bound)
        return made.copy_(values.view(self.shape))


class OpCall(NamedTuple):
    """An op and the shapes of its arguments."""

    func: Callable[..., Any]
    arguments: Hashable

    @staticmethod
    def of(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> OpCall:
        """Return the call of an op with these arguments."""
        return OpCall(func, (_frozen(args), _frozen(kwargs)))

    def bind(self, device: torch.device) -> Callable[[], Any]:
        """Return a function that runs the op on real tensors of a device."""
        # An index may select from any dimension.
        bound = min((size for size in _sizes(self.arguments) if size > 1), default=1)
        args, kwargs = (_thawed(each, device, bound) for each in self.arguments)  # type: ignore[attr-defined]
        return lambda: self.func(*args, **kwargs)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return _num_bytes(self.arguments)


def _frozen(found: Any) -> Hashable:
    if isinstance(found, torch.Tensor):
        return TensorLike(tuple(found.shape), tuple(found.stride()), found.dtype)
    if isinstance(found, dict):
        return dict, tuple((name, _frozen(found[name])) for name in sorted(found))
    if isinstance(found, list | tuple):
        return type(found), tuple(_frozen(each) for each in found)
    return found  # type: ignore[no-any-return]


def _sizes(found: Any) -> Iterator[int]:
    if isinstance(found, TensorLike):
        yield from found.shape
    elif isinstance(found, tuple):
        for each in found:
            yield from _sizes(each)


def _thawed(found: Any, device: torch.device, bound: int) -> Any:
    if isinstance(found, TensorLike):
        return found.make(device, bound)
    if isinstance(found, torch.device):
        return device
    if isinstance(found, tuple) and len(found) == 2 and found[0] is dict:
        return {name: _thawed(value, device, bound) for name, value in found[1]}
    if isinstance(found, tuple) and len(found) == 2 and found[0] in (list, tuple):
        return found[0](_thawed(each, device, bound) for each in found[1])
    return found


def _num_bytes(found: Any) -> int:
    if isinstance(found, TensorLike):
        return found.dtype.itemsize * torch.Size(found.shape).numel()
    return sum(map(_num_bytes, found)) if isinstance(found, tuple) else 0


@dataclass
class Work:
    """The work of a pass: FLOPs of matrix products, and bytes that other ops read and write."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: int = 0
    calls: Counter[OpCall] = field(default_factory=Counter)
    """How often each op is called with tensors of the same shapes."""
    is_inside: bool = False
    """Whether a function is running whose ops are not counted."""

    def copy(self) -> Work:
        """Return a copy that further ops do not change."""
        return replace(self, calls=self.calls.copy())


# -- attention and dropout on the meta device, with the tensors that their CUDA kernels save ---------------------------


@contextmanager
def as_on_cuda(work: Work) -> Iterator[None]:
    """Replace attention and dropout by versions that save the same tensors as their CUDA kernels.

    The functions themselves are patched, because a torch function mode would not see recomputed forwards. Autocast is
    replaced by one that accepts the meta device.
    """
    before, autocast = F.dropout, torch.autocast
    F.dropout, torch.autocast = _drop_out, _MetaAutocast  # type: ignore[misc]
    try:
        with dispatch.replaced(partial(_attend, work)):
            yield
    finally:
        F.dropout, torch.autocast = before, autocast  # type: ignore[misc]


class _MetaAutocast(torch.autocast):
    """Autocast that has no effect on the meta device, where layers disable it for some of their ops."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _drop_out(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _attend(
    work: Work,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return _Attention.apply(query, key, value, work, is_causal)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Work, is_causal: bool
    ) -> torch.Tensor:
        work.is_inside = True
        *batch, heads, rows, _ = query.shape
        out = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty(*batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        # Two products of rows x columns x width; a causal mask leaves half of them.
        ctx.flops = 4 * query.numel() * key.shape[-2] * (0.5 if is_causal else 1.0)
        ctx.work, ctx.is_causal, work.is_inside = work, is_causal, False
        work.flops += ctx.flops
        work.num_ops += 1
        work.calls[OpCall.of(attend, (query, key, value, is_causal), {})] += 1
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, _, _ = ctx.saved_tensors
        ctx.work.flops += 2.5 * ctx.flops
        ctx.work.num_ops += 3
        ctx.work.calls[OpCall.of(attend_backward, (query, key, value, ctx.is_causal), {})] += 1
        ctx.work.is_inside = True
        accumulator = torch.empty_like(query, dtype=torch.float32)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del accumulator
        ctx.work.is_inside = False
        return (*gradients, None, None)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Run the forward of attention."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def attend_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
    """Run the forward and backward of attention. `OpTimer` subtracts the time of the forward."""
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        found = attend(inputs[0], inputs[1], inputs[2], is_causal)
    return torch.autograd.grad(found, inputs, found.detach())


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass
class OpTimer:
    """A cache of measured times of ops. `bandwidth` (bytes/s) is used for ops that cannot be run."""

    device: torch.device
    bandwidth: float
    known: dict[OpCall, float] = field(default_factory=dict)

    def seconds_of(self, calls: Counter[OpCall]) -> float:
        """Return the device seconds of all calls."""
        with torch.no_grad():
            return sum(number * self._time(call) for call, number in calls.items())

    def _time(self, call: OpCall) -> float:
        if call not in self.known:
            self.known[call] = self._run(call)
            if call.func is attend_backward:
                self.known[call] -= self._time(OpCall(attend, call.arguments))
        return self.known[call]

    def _run(self, call: OpCall) -> float:
        try:
            run = call.bind(self.device)
            return _device_seconds(run) if self.device.type == "cuda" else _host_seconds(run)
        except (RuntimeError, TypeError, NotImplementedError):
            return call.num_bytes / self.bandwidth


def _device_seconds(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SLEEP)
    begin.record()
    for _ in range(_REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPEATS


def _host_seconds(run: Callable[[], Any]) -> float:
    """Return the median. Results are kept until the end, as in a forward, so that every call allocates new memory."""
    made = [run()]
    began, taken = time.perf_counter(), list[float]()
    while len(taken) < _REPEATS and time.perf_counter() - began < _PATIENCE:
        before = time.perf_counter()
        made.append(run())
        taken.append(time.perf_counter() - before)
    return sorted(taken)[len(taken) // 2]
