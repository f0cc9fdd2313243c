"""One captured call of a block: its forward and backward as CUDA graphs, and what the graphs of a pass share.

[Note: memory of captured calls]
All graphs of one pass share a memory pool, which stays allocated between steps. A graph may use memory that an earlier
graph of the pass has freed, so they are replayed in the order in which they were captured: forwards in the order of
blocks, then backwards in reverse. A pass may skip blocks, but a block that runs out of order, or while the graph of an
earlier pass is alive, is not replayed. Outputs and gradients of inputs are tensors of the pool, which the next pass
overwrites. Gradients of parameters are read before the next graph runs, so they do not keep their memory.

[Note: inputs of captured calls]
A graph reads its inputs at fixed addresses. The output of a captured block is at such an address already; any other
input is copied there before the graph runs, once for all blocks that get the same tensor. Parameters of stages 0 to 2
are read in place. Those that are resharded after use are copied from where they were gathered to memory that all blocks
share.
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


class PassToken:
    """Lives as long as the autograd graph of one pass."""


class CapturedPass:
    """What the graphs that were captured in one pass share: memory, a stream, and the order of replays.

    `weights` has the memory that parameters are copied to. All passes share it.
    """

    def __init__(self, device: torch.device, weights: dict[tuple[int, torch.dtype], Tensor]) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # An input that requires a gradient, for calls that have none of their own.
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        # Addresses of the storages that replays write.
        self.written: set[int] = set()
        self.num_calls = 0
        self._stream = torch.cuda.Stream(device)
        # Static copies of inputs: by the id of the input while the pass is captured, and what they have now.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._current: dict[int, tuple[Tensor, int]] = {}
        self._weights = weights
        # The token of the present pass, which its autograd graph refers to as well, and that of the last pass.
        self._token: PassToken | None = None
        self._last_token: weakref.ref[PassToken] | None = None
        self._last_forward = -1

    def begin(self) -> None:
        """Begin a pass of the model."""
        self._token, self._last_forward = None, -1
        self._current.clear()

    def enter(self, number: int) -> PassToken | None:
        """Return the token of the present pass for a call, or None if a replay would overwrite what is in use."""
        if self._token is None:
            if self._last_token is not None and self._last_token() is not None:
                return None
            self._token = PassToken()
            self._last_token = weakref.ref(self._token)
        if number <= self._last_forward:
            return None
        self._last_forward = number
        return self._token

    def end_capture(self) -> None:
        """Forget the inputs of the pass that was captured."""
        self._copies.clear()

    def weights(self, position: int, full: Tensor) -> Tensor:
        """Return the memory for the flat parameter at a position of a block, which all blocks share."""
        return self._weights[position, full.dtype][: full.numel()]

    def static_input(self, source: Tensor) -> Tensor:
        """Return a tensor at a fixed address with the values of an input."""
        if source.untyped_storage().data_ptr() in self.written:
            return source.detach()
        found = self._copies.get(id(source))
        if found is None:
            found = self._copies[id(source)] = source, static_copy(source)
            self._current[id(found[1])] = source, source._version
        return found[1]

    def refresh(self, static: Tensor, source: Tensor) -> None:
        """Copy an input to its fixed address, unless it is there."""
        if source.data_ptr() == static.data_ptr():
            return
        current = self._current.get(id(static))
        if current is None or current[0] is not source or current[1] != source._version:
            update(static, source)
            self._current[id(static)] = source, source._version

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
    """The gradients of the parameters of a flat parameter, None if there are none, and which of them are present."""

    flat: Tensor | None
    present: tuple[int, ...]


class CapturedCall:
    """The graphs of one block for calls with one signature.

    `run` calls the block with static arguments and leaves in place of its parameters. `load` copies its parameters to
    where `leaves` are views of. `deliver` takes the gradients of leaves after each backward, in the form that `collect`
    returned for them while the backward was captured.
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
    ) -> None:
        self.shared, self._name, self._leaves = shared, name, leaves
        self._load, self._collect, self._deliver = load, collect, deliver
        self._number = shared.num_calls
        shared.num_calls += 1
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
        self._structure = with_tensors(output, iter([tensor.detach() for tensor in found]))
        self._outputs = [tensor.detach() for tensor in found]
        self._differentiable = [tensor.requires_grad for tensor in found]
        shared.written.update(tensor.untyped_storage().data_ptr() for tensor in found)
        self._gradients_of_outputs: list[Tensor] = []
        self._gradients_of_inputs: list[Tensor | None] = []
        self._gradients_of_leaves: list[Gradients] = []

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
        token = self.shared.enter(self._number)
        if token is None:
            return False, None
        inputs = [tensor for tensor in tensors if tensor.requires_grad] or [self.shared.anchor]
        found = _Replay.apply(self, token, tensors, *inputs)  # type: ignore[no-untyped-call]
        return True, with_tensors(self._structure, iter(found))

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward on new inputs."""
        for static, tensor in zip(self._statics, tensors, strict=True):
            self.shared.refresh(static, tensor)
        self._load()
        self._forward.replay()
        return tuple(tensor.detach() for tensor in self._outputs)

    @property
    def constant_outputs(self) -> Iterator[int]:
        """The positions of outputs without gradients."""
        return (index for index, differentiable in enumerate(self._differentiable) if not differentiable)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the backward, deliver the gradients of parameters, and return those of the inputs that require them."""
        given = [gradient for gradient, is_used in zip(gradients, self._differentiable, strict=True) if is_used]
        self._load()
        if self._backward is None:
            self._capture_backward(given)
        for static, gradient in zip(self._gradients_of_outputs, given, strict=True):
            if static.data_ptr() != gradient.data_ptr():
                static.copy_(gradient)
        assert self._backward is not None
        self._backward.replay()
        self._deliver(self._gradients_of_leaves)
        return [tensor.detach() if tensor is not None else None for tensor in self._gradients_of_inputs]

    def _capture_backward(self, gradients: Sequence[Tensor]) -> None:
        written = self.shared.written
        statics = [
            gradient.detach() if gradient.untyped_storage().data_ptr() in written else gradient.detach().clone()
            for gradient in gradients
        ]
        outputs = [tensor for tensor in self._recorded if tensor.requires_grad]
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
        self._gradients_of_inputs = [tensor.detach() if tensor is not None else None for tensor in found[: len(inputs)]]
        written.update(t.untyped_storage().data_ptr() for t in self._gradients_of_inputs if t is not None)
        self._gradients_of_leaves = [
            Gradients(without_ownership(some.flat) if some.flat is not None else None, some.present)
            for some in collected
        ]


class _Replay(torch.autograd.Function):
    """Replays a call. Its inputs are those that require a gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: CapturedCall, token: PassToken, tensors: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.token = call, token
        ctx.copies = [tensor.is_leaf or tensor.retains_grad for tensor in inputs]
        outputs = call.replay_forward(tensors)
        ctx.mark_non_differentiable(*(outputs[index] for index in call.constant_outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.token is None:
            raise RuntimeError(
                "onefold.cuda_graphs: a backward runs through a captured block for the second time, but its "
                "activations are overwritten. Set cuda_graphs to false for retain_graph=True."
            )
        ctx.token = None
        found = ctx.call.replay_backward(gradients) or [None]  # of the anchor
        # A leaf keeps its gradient, which the next pass would overwrite.
        copied = [t.clone() if t is not None and copies else t for t, copies in zip(found, ctx.copies, strict=True)]
        return None, None, None, *copied
