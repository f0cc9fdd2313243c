"""Call a function over chunks of the batch, and recompute one chunk at a time in backward.

[Note: a call in chunks]
The forward runs the chunks without a graph. Only the inputs of the call, and the random state at the beginning of each
chunk, are kept. The backward recomputes one chunk with its graph, runs through it, and frees it before the next one.
Autograd sees one node, which receives the gradients of the whole outputs and returns one gradient per input and
parameter. Everything around the call (hooks of units, reductions, accumulation) is therefore the same for any number of
chunks. Gradients of parameters, and of inputs that all chunks share, are added over chunks in fp32 in the order of the
chunks, and rounded to their dtype once.

[Note: a call in chunks inside a checkpoint]
A block of chunks needs no checkpoint around it. But the checkpoint of a block that calls an MLP in tiles recomputes
the input of the MLP too. Such a call (`is_recomputed`) saves its inputs by a node before its own, so that the
checkpoint has them as soon as they are recomputed. If nothing is saved after them, it stops there, and does not
recompute the tiles, which the backward of the call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from onefold.runtime.parameter_proxy import is_sharded
from onefold.runtime.torch_internals import outside_checkpoint, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Called with the outputs of the first recomputed chunk and the tensors that get a gradient from it.
Inspection = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def cut_sizes(total: int, num_chunks: int) -> list[int]:
    """Return the sizes of at most `num_chunks` chunks. They differ by at most one, the larger ones first."""
    number = max(1, min(num_chunks, total))
    return [total // number + (index < total % number) for index in range(number)]


class ChunkedCall:
    """One call of a function in chunks of the batch, without its tensors: `inputs` are the tensors of its arguments.

    Tensors whose first dimension is the batch size of the first floating-point argument are divided. All other
    arguments are passed to every chunk. `name` is used in error messages. `tables` collects the places of arguments
    that had another first dimension in some call (rotary tables). They are not divided if a later batch happens to have
    as many samples as they have rows. `otherwise` ends error messages.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tables: set[tuple[int, ...]] | None = None,
        *,
        otherwise: str = "set onefold.batch_chunks to 0",
    ) -> None:
        self.name, self._function, self._otherwise = name, function, otherwise
        leaves, spec = tree_flatten((args, kwargs))
        self._arguments = _Tree(leaves, spec)
        inputs = self._arguments.tensors_of(leaves)
        first = next((tensor for tensor in inputs if tensor.is_floating_point() and tensor.dim() > 1), None)
        if first is None:
            raise RuntimeError(
                f"{name} has no floating-point tensor with a batch dimension among its arguments, so its batch cannot "
                f"be divided into chunks. Name other modules in onefold.units, or {otherwise}."
            )
        self.batch = first.shape[0]
        self.num_rows = first.numel() // max(1, first.shape[-1])
        tables = tables if tables is not None else set()
        places = [(len(inputs), index, tensor.dim()) for index, tensor in enumerate(inputs)]
        # A first dimension of 1 is no evidence: a mask may be the same for all samples of one batch only.
        others = (
            place for place, t in zip(places, inputs, strict=True) if t.dim() and t.shape[0] not in (1, self.batch)
        )
        tables.update(others)
        self._divided = [
            tensor.dim() > 0 and tensor.shape[0] == self.batch and place not in tables
            for place, tensor in zip(places, inputs, strict=True)
        ]
        self._check_objects()

    def _check_objects(self) -> None:
        """Raise for arguments that hold tensors of the batch and cannot be divided."""
        for leaf in self._arguments.others:
            if isinstance(leaf, _PLAIN):
                continue
            kind = type(leaf).__name__
            holds_batch = any(tensor.dim() and tensor.shape[0] == self.batch for tensor in tensors_in(leaf))
            if holds_batch or kind.endswith("Cache"):
                raise RuntimeError(
                    f"{self.name} is called with a {kind}, which holds values of the whole batch and cannot be divided "
                    f"into chunks. Call the model without it (use_cache=False), or {self._otherwise}."
                )

    @staticmethod
    def inputs_of(args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors among the arguments of a call."""
        return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]

    def run(
        self,
        num_chunks: int,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        inspect: Inspection | None = None,
        *,
        is_recomputed: bool = False,
    ) -> Any:
        """Call the function in at most `num_chunks` chunks, and return its outputs for the whole batch.

        `parameters` are the tensors that the function uses in addition to its arguments. With `is_recomputed`, a
        checkpoint around the call recomputes its inputs. See [Note: a call in chunks inside a checkpoint].
        """
        if not self.batch:
            return self.call(inputs, 0, 0)
        self.sizes = cut_sizes(self.batch, num_chunks)
        self._autocast = _Autocast(inputs)
        if not torch.is_grad_enabled():
            whole = self._run_chunks(inputs)
            return self._outputs.filled(whole)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if is_recomputed:
            inputs = [_Kept.apply(tensor) if tensor.requires_grad else tensor for tensor in inputs]
        with nullcontext() if is_recomputed else outside_checkpoint():
            outputs = _InChunks.apply(self, len(inputs), inspect, *inputs, *trained)
        return self._outputs.filled(outputs)

    def call(self, inputs: Sequence[Tensor], start: int, size: int) -> Any:
        """Call the function for `size` samples from `start` on."""
        args, kwargs = self._arguments.filled(self.slices(inputs, start, size))
        return self._function(*args, **kwargs)

    def slices(self, inputs: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
        """Return the inputs of some samples."""
        return [
            tensor.narrow(0, start, size) if divided else tensor
            for tensor, divided in zip(inputs, self._divided, strict=True)
        ]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the first sample and the size of each chunk."""
        return zip(accumulate(self.sizes, initial=0), self.sizes, strict=False)

    # -- forward ------------------------------------------------------------------------------------------------

    def _run_chunks(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run all chunks without a graph, and return the tensors of the whole outputs."""
        self._random: list[RandomState] = []
        whole: list[Tensor] = []
        for start, size in self.chunks():
            self._random.append(RandomState(inputs))
            leaves, spec = tree_flatten(self.call(inputs, start, size))
            found = _Tree(leaves, spec)
            if not start:
                self._outputs = found
                self._check_outputs()
                whole = [self._allocate(tensor, size) for tensor in found.tensors_of(leaves)]
            elif not found.is_like(self._outputs):
                raise RuntimeError(
                    f"{self.name} returns outputs of different structures for two chunks of a batch, so they cannot be "
                    f"combined. Return one structure, or {self._otherwise}."
                )
            for output, tensor in zip(whole, found.tensors_of(leaves), strict=True):
                _part(output, self.batch, start, size).copy_(tensor)
        if self._autocast.is_enabled:
            # Casts of weights that were cached without a graph must not be used by later operations with one.
            torch.clear_autocast_cache()
        return whole

    def _check_outputs(self) -> None:
        for leaf in self._outputs.others:
            if any(True for _ in tensors_in(leaf)):
                raise RuntimeError(
                    f"{self.name} returns a {type(leaf).__name__}, but outputs of chunks are combined only in tensors, "
                    f"tuples, lists and dicts. Return one of these, or {self._otherwise}."
                )

    def _allocate(self, tensor: Tensor, size: int) -> Tensor:
        """Allocate the whole output for that of a first chunk. Its first dimension may be samples times tokens."""
        if not tensor.dim() or tensor.shape[0] % size:
            raise RuntimeError(
                f"{self.name} returns a tensor of shape {list(tensor.shape)} for {size} samples. It has no batch "
                "dimension, so the outputs of chunks cannot be combined. Return such a value per sample, or "
                f"{self._otherwise}."
            )
        return tensor.new_empty((tensor.shape[0] // size * self.batch, *tensor.shape[1:]))

    # -- backward -----------------------------------------------------------------------------------------------

    def _backward_chunks(
        self,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[Tensor | None],
        inspect: Inspection | None,
    ) -> list[Tensor | None]:
        """Recompute each chunk and run through it. Return the gradients of inputs and parameters."""
        sums = [
            _GradientParts(tensor) if divided else _GradientSum(tensor.dtype)
            for tensor, divided in zip(inputs, self._divided, strict=True)
        ] + [_GradientSum(parameter.dtype) for parameter in parameters]
        with _forked_random_state(inputs), _without_hooks(parameters):
            for (start, size), random in zip(self.chunks(), self._random, strict=True):
                random.restore()
                found = self._backward_chunk(start, size, inputs, parameters, wanted, gradients, inspect)
                inspect = None
                for total, is_wanted in zip(sums, wanted, strict=True):
                    # Each gradient is freed once it is added.
                    total.add(found.pop() if is_wanted else None, start, size)
        return [total.result() for total in sums]

    def _backward_chunk(
        self,
        start: int,
        size: int,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[Tensor | None],
        inspect: Inspection | None,
    ) -> list[Tensor | None]:
        """Return the gradients of the wanted inputs and parameters from one chunk, the last one first."""
        chunk = [tensor.detach() for tensor in self.slices(inputs, start, size)]
        targets = [tensor for tensor, is_wanted in zip((*chunk, *parameters), wanted, strict=True) if is_wanted]
        for tensor, is_wanted in zip(chunk, wanted, strict=False):
            tensor.requires_grad_(is_wanted)
        with torch.enable_grad(), self._autocast.restored():
            args, kwargs = self._arguments.filled(chunk)
            outputs = self._outputs.tensors_of(tree_flatten(self._function(*args, **kwargs))[0])
        if inspect is not None:
            inspect(outputs, targets)
        pairs = [
            (output, _part(gradient, self.batch, start, size))
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if not pairs:
            return [None] * len(targets)
        outputs, received = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        found = torch.autograd.grad(outputs, [*map(_edge, targets)], received, allow_unused=True)
        return list(reversed(found))


def _edge(target: Tensor) -> Any:
    """Return a tensor whose gradient is computed, or the node of a Parameter without values."""
    if not is_sharded(target):
        return target
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(target)


class _Kept(torch.autograd.Function):
    """The node of an input of a call in chunks, which saves the input for the node of the call."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _InChunks(torch.autograd.Function):
    """The node of a call in chunks. See [Note: a call in chunks]."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, num_inputs: int, inspect: Inspection | None, *tensors: Tensor) -> Any:
        inputs = tensors[:num_inputs]
        versions = [tensor._version for tensor in inputs]
        outputs = call._run_chunks(inputs)
        if versions != [tensor._version for tensor in inputs]:
            raise RuntimeError(
                f"{call.name} changes one of its arguments in place, so it cannot be recomputed in chunks. Clone the "
                f"argument before the change, or {call._otherwise}."
            )
        # The nodes of inputs that are saved before this one.
        nodes = [tensor.grad_fn for tensor in inputs]
        ctx.kept = [node if getattr(node, "_forward_cls", None) is _Kept else None for node in nodes]
        ctx.save_for_backward(*(tensor for tensor, kept in zip(inputs, ctx.kept, strict=True) if not kept))
        ctx.call, ctx.inspect, ctx.parameters = call, inspect, tensors[num_inputs:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[3:]
        saved = iter(ctx.saved_tensors)
        inputs = [kept.saved_tensors[0] if kept else next(saved) for kept in ctx.kept]
        arguments = (inputs, ctx.parameters, wanted, gradients, ctx.inspect)
        return None, None, None, *ctx.call._backward_chunks(*arguments)


class _Tree:
    """The structure of arguments or outputs, and the leaves among them that are no tensors."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._spec = spec
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def is_like(self, other: _Tree) -> bool:
        """Return whether two trees have tensors in the same places."""
        return self._spec == other._spec and self._is_tensor == other._is_tensor

    def tensors_of(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors among the leaves of such a tree."""
        return [leaf for leaf, is_tensor in zip(leaves, self._is_tensor, strict=True) if is_tensor]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with these tensors in it."""
        rest = iter(tensors)
        pairs = zip(self._is_tensor, self.others, strict=True)
        return tree_unflatten([next(rest) if is_tensor else leaf for is_tensor, leaf in pairs], self._spec)


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Suspend the tensor hooks of parameters, which autograd calls with the sum over all chunks afterwards."""
    held = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


def _part(whole: Tensor, batch: int, start: int, size: int) -> Tensor:
    """Return the part of a whole output that belongs to some samples."""
    per_sample = whole.shape[0] // batch
    return whole.narrow(0, start * per_sample, size * per_sample)


class _GradientSum:
    """The gradient of a parameter or of an input of every chunk: the sum over chunks, in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None
        self._num = 0

    def add(self, gradient: Tensor | None, start: int, size: int) -> None:
        """Add the gradient of a chunk, or None if the chunk has none."""
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        self._num += 1
        if self._total is None:
            self._total = gradient
        elif self._num == 2:  # The first gradient may be shared with other tensors, so it is not written to.
            wide = torch.promote_types(self._dtype, torch.float32)
            self._total = self._total.to(wide, copy=True).add_(gradient)
        else:
            self._total.add_(gradient)

    def result(self) -> Tensor | None:
        """Return the sum, rounded to the dtype of the tensor."""
        total, self._total = self._total, None
        return total.to(self._dtype) if total is not None else None


class _GradientParts:
    """The gradient of a divided input, of which each chunk computes a part."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._whole: Tensor | None = None

    def add(self, gradient: Tensor | None, start: int, size: int) -> None:
        """Store the part of a chunk, or zeros if the chunk has no gradient."""
        if gradient is None and self._whole is None:
            return
        if self._whole is None:
            self._whole = torch.empty_like(self._tensor, memory_format=torch.contiguous_format)
            self._whole[:start].zero_()
        part = self._whole.narrow(0, start, size)
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient)

    def result(self) -> Tensor | None:
        """Return the whole gradient."""
        return self._whole


# -- random state and autocast, as in torch.utils.checkpoint -----------------------------------------------------------


def _devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")))


class RandomState:
    """The random state of the CPU and of the devices of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in _devices(tensors)]

    def restore(self) -> None:
        """Set the random state."""
        torch.set_rng_state(self._cpu)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        pairs = zip([self._cpu, *dict(self._others).values()], [other._cpu, *dict(other._others).values()], strict=True)
        return all(torch.equal(one, another) for one, another in pairs)

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _forked_random_state(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the random state of before at the end."""
    before = RandomState(tensors)
    try:
        yield
    finally:
        before.restore()


class _Autocast:
    """The autocast settings of the CPU and of the device of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        types = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors if not tensor.is_meta)])
        self._types = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]
        self._caches = torch.is_autocast_cache_enabled()
        self.is_enabled = any(enabled for _, enabled, _ in self._types)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run with these settings."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._types:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._caches))
            yield
