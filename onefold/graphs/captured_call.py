"""One captured call of a block: its forward and backward as CUDA graphs, and what the graphs of a pass share.

[Note: memory of captured calls]
All graphs of one pass share a memory pool, which stays allocated between steps. A graph may use memory that an earlier
graph of the pass has freed, so graphs are replayed in the order in which they were captured. A pass may skip blocks. A
forward that comes out of order, or while the autograd graph of an earlier pass is alive, runs eagerly instead; a
backward that comes out of order is an error. Whatever a replay returns is copied from the pool at once, because
programs may keep it, and later graphs write the same memory.

[Note: inputs of captured calls]
A graph reads its inputs at fixed addresses. They are copied there before the graph runs, once for all blocks that get
the same tensor. If blocks that got one tensor at the capture get different ones later, the second of them runs eagerly:
the backward of the first still reads that memory. Parameters of stages 0 to 2 are read in place. Those that are
resharded after use are copied from where they were gathered to memory that all blocks share.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onefold.graphs.call_signature import (
    NotCapturable,
    signature_of,
    static_copy,
    update,
    with_tensors,
    without_ownership,
)

_Version = tuple[weakref.ref[Tensor], int]


def _version_of(tensor: Tensor) -> _Version:
    """Return what identifies a tensor and its values, without keeping it alive."""
    return weakref.ref(tensor), tensor._version


class PassToken:
    """An object that the autograd graph of one pass refers to, which shows whether that graph is alive."""


class CapturedPass:
    """What the graphs that were captured in one pass share: memory, a stream, and the order of replays.

    `weights` has the memory that parameters are copied to. All passes share it.
    """

    def __init__(self, device: torch.device, weights: dict[tuple[int, torch.dtype], Tensor]) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # An input that requires a gradient, for calls that have none of their own.
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._stream = torch.cuda.Stream(device)
        # Static copies of inputs: by the id of the input while the pass is captured, and what they have now.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._current: dict[int, _Version] = {}
        self._weights = weights
        # The token of the present pass, which its autograd graph refers to as well, and that of the last pass.
        self._token: PassToken | None = None
        self._last_token: weakref.ref[PassToken] | None = None
        # The number of graphs, and the position of the last one that was replayed in this pass.
        self._num_graphs = 0
        self._last = -1

    def begin(self) -> None:
        """Begin a pass of the model."""
        self._token, self._last = None, -1
        self._current.clear()

    def next_position(self) -> int:
        """Return the position of a graph that is about to be captured."""
        self._num_graphs += 1
        return self._num_graphs - 1

    def enter_forward(self, position: int, inputs: Sequence[tuple[Tensor, Tensor]]) -> PassToken | None:
        """Return the token of the present pass, or None if a replay would overwrite what is in use."""
        if self._token is None:
            if self._last_token is not None and self._last_token() is not None:
                return None
            self._token = PassToken()
            self._last_token = weakref.ref(self._token)
        if position <= self._last or not self._can_refresh(inputs):
            return None
        self._last = position
        return self._token

    def enter_backward(self, position: int) -> bool:
        """Return whether a backward may be replayed, because no later graph has run in this pass."""
        if position <= self._last:
            return False
        self._last = position
        return True

    def end_capture(self) -> None:
        """Forget the inputs of the pass that was captured."""
        self._copies.clear()

    def weights(self, position: int, full: Tensor) -> Tensor:
        """Return the memory for the flat parameter at a position of a block, which all blocks share."""
        return self._weights[position, full.dtype][: full.numel()]

    def static_input(self, source: Tensor) -> Tensor:
        """Return a tensor at a fixed address with the values of an input."""
        found = self._copies.get(id(source))
        if found is None:
            found = self._copies[id(source)] = source, static_copy(source)
            self._current[id(found[1])] = _version_of(source)
        return found[1]

    def _can_refresh(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Return whether no fixed address has another input of this pass."""
        wanted: dict[int, _Version] = {}
        for static, source in inputs:
            reference, version = now = _version_of(source)
            has = wanted.setdefault(id(static), self._current.get(id(static), now))
            if has[0] is not reference or has[1] != version:
                return False
        return True

    def refresh(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy inputs to their fixed addresses, as far as they are not there."""
        for static, source in inputs:
            if id(static) not in self._current:
                update(static, source)
                self._current[id(static)] = _version_of(source)

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the kernels that the body launches, without running them."""
        graph = torch.cuda.CUDAGraph()
        collects, caches = gc.isenabled(), torch.is_autocast_cache_enabled()
        self._stream.wait_stream(torch.cuda.current_stream())
        gc.disable()  # the collector may free memory in a way that a capture does not allow
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    yield graph
                except BaseException:
                    with suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            torch.set_autocast_cache_enabled(caches)
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)


class Gradients(NamedTuple):
    """The gradients of the parameters of a flat parameter, None if there are none, and which of them are present.

    `square` is the sum of their squares, if the graph computes it. `stays`: the memory of both keeps its values until
    the next forward of the block, instead of until the next graph runs. It may not outlive that forward, because the
    forward was captured first and may use the same memory.
    """

    flat: Tensor | None
    present: tuple[int, ...]
    square: Tensor | None = None
    stays: bool = False


class CapturedCall:
    """The graphs of one block for calls with one signature.

    `run` calls the block with static arguments and leaves in place of its parameters. `load` copies its parameters to
    where `leaves` are views of. `deliver` takes the gradients of leaves after each backward, in the form that `collect`
    returned for them while the backward was captured.

    The backward is captured when it runs first, or right after the forward if it is known which outputs of the block
    get gradients (`used`, by the position of the output).
    """

    def __init__(
        self,
        name: str,
        shared: CapturedPass,
        tensors: Sequence[Tensor],
        leaves: Sequence[Tensor],
        run: Callable[[list[Tensor]], Any],
        load: Callable[[], None],
        collect: Callable[[list[Tensor | None]], list[Gradients]],
        deliver: Callable[[list[Gradients]], None],
        used: Sequence[int] | None = None,
    ) -> None:
        self.shared, self._name, self._leaves = shared, name, leaves
        self._load, self._collect, self._deliver = load, collect, deliver
        self._position = shared.next_position()
        self._statics = [shared.static_input(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
        self._backward: torch.cuda.CUDAGraph | None = None
        load()
        with shared.capture() as graph:
            output = run(self._statics)
            found: list[Tensor] = []
            signature_of(output, found, "its output")
            self._check_sources(found)
        self._forward = graph
        # The outputs with their autograd graph, until the backward is captured.
        self._recorded: list[Tensor] = found
        self._structure = with_tensors(output, iter([torch.empty(0)] * len(found)))
        self._outputs = [without_ownership(tensor) for tensor in found]
        self._differentiable = [tensor.requires_grad for tensor in found]
        # The positions of outputs that get gradients. The others have none, or it is zero.
        self._used = [n for n, is_used in enumerate(self._differentiable) if is_used] if used is None else [*used]
        self._backward_position = -1
        self._gradients_of_outputs: list[Tensor] = []
        self._gradients_of_inputs: list[Tensor | None] = []
        self._gradients_of_leaves: list[Gradients] = []
        if used is not None:
            self._capture_backward()

    def _check_sources(self, outputs: Sequence[Tensor]) -> None:
        """Raise if gradients flow to a tensor that is neither an argument nor a parameter."""
        known = {id(tensor) for tensor in (*self._statics, *self._leaves)}
        nodes: list[Any] = [tensor.grad_fn for tensor in outputs]
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise NotCapturable("it uses a tensor with a gradient that is neither an argument nor its parameter")
            nodes += [before for before, _ in node.next_functions]

    def replay(self, tensors: Sequence[Tensor]) -> tuple[bool, Any]:
        """Return whether the call could be replayed, and its output."""
        given = [*zip(self._statics, tensors, strict=True)]
        token = self.shared.enter_forward(self._position, given)
        if token is None:
            return False, None
        inputs = [tensor for tensor in tensors if tensor.requires_grad] or [self.shared.anchor]
        found = _Replay.apply(self, token, given, *inputs)  # type: ignore[no-untyped-call]
        return True, with_tensors(self._structure, iter(found))

    def replay_forward(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        """Run the forward on new inputs."""
        self.shared.refresh(inputs)
        self._load()
        self._forward.replay()
        return tuple(tensor.clone() for tensor in self._outputs)

    @property
    def constant_outputs(self) -> Iterator[int]:
        """The positions of outputs without gradients."""
        return (index for index, differentiable in enumerate(self._differentiable) if not differentiable)

    def replay_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward, deliver the gradients of parameters, and return those of the inputs that require them."""
        self._load()
        if self._backward is None:
            self._capture_backward()
        assert self._backward is not None
        if not self.shared.enter_backward(self._backward_position):
            raise RuntimeError(
                f"onefold.cuda_graphs: the backward of {self._name} runs in another order than in the step in which it "
                "was captured, so its activations may be overwritten. Set cuda_graphs to false."
            )
        if any(gradient is not None for n, gradient in enumerate(gradients) if n not in self._used):
            raise RuntimeError(
                f"onefold.cuda_graphs: the backward of {self._name} begins at an output that had no gradient when it "
                'was captured. Set cuda_graphs to "blocks".'
            )
        for static, position in zip(self._gradients_of_outputs, self._used, strict=True):
            gradient = gradients[position]
            if gradient is None:
                static.zero_()
            else:
                static.copy_(gradient)
        self._backward.replay()
        self._deliver(self._gradients_of_leaves)
        return [tensor.clone() if tensor is not None else None for tensor in self._gradients_of_inputs]

    def _capture_backward(self) -> None:
        self._backward_position = self.shared.next_position()
        outputs = [self._recorded[position] for position in self._used]
        statics = [torch.zeros_like(self._outputs[position]) for position in self._used]
        inputs = [tensor for tensor in self._statics if tensor.requires_grad]
        wanted = [*inputs, *(leaf for leaf in self._leaves if leaf.requires_grad)]
        try:
            with self.shared.capture() as graph:
                found = torch.autograd.grad(outputs, wanted, statics, allow_unused=True)
                of_leaves = iter(found[len(inputs) :])
                collected = self._collect([next(of_leaves) if leaf.requires_grad else None for leaf in self._leaves])
        except RuntimeError as error:
            raise RuntimeError(
                f"onefold.cuda_graphs: the backward of {self._name} cannot be captured: {error}. Set cuda_graphs to "
                "false."
            ) from error
        self._recorded.clear()
        self._backward, self._gradients_of_outputs = graph, statics
        self._gradients_of_inputs = [
            without_ownership(tensor) if tensor is not None else None for tensor in found[: len(inputs)]
        ]
        self._gradients_of_leaves = [
            some._replace(flat=without_ownership(some.flat)) if some.flat is not None and not some.stays else some
            for some in collected
        ]


class _Replay(torch.autograd.Function):
    """Replays a call. Its inputs are those that require a gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: CapturedCall, token: PassToken, given: Sequence[tuple[Tensor, Tensor]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.token = call, token
        ctx.set_materialize_grads(False)
        outputs = call.replay_forward(given)
        ctx.mark_non_differentiable(*(outputs[index] for index in call.constant_outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.token is None:
            raise RuntimeError(
                "onefold.cuda_graphs: a backward runs through a captured block for the second time, but its "
                "activations are overwritten. Set cuda_graphs to false for retain_graph=True."
            )
        ctx.token = None
        return None, None, None, *(ctx.call.replay_backward(gradients) or [None])  # None for the anchor
