"""Expert layers: modules with stacked experts that are called with routed tokens, or with a list of experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from onefold.errors import ConfigError
from onefold.runtime import ExpertOf, unsharded_shape

# The attribute by which `experts` marks a module. Its value is the name of the attribute with the number of experts,
# or `_LIST`.
_MARK = "_onefold_experts"
# The attribute with the number of parts that the program asks for.
_SIZE = "_onefold_expert_parts"
# The first arguments of the forward of expert layers in transformers: tokens, and the experts and weights of each.
_ARGUMENTS = [
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
]
_COUNT = "num_experts"
# The name of a list of experts in layers that are not marked.
_LIST = "experts"


@dataclass(frozen=True)
class ExpertLayer:
    """A module with stacked experts, or with a list of experts."""

    name: str
    module: nn.Module
    num_experts: int
    count: str = ""
    """The attribute of the module with the number of experts, which the forward of stacked experts reads."""
    stacked: tuple[str, ...] = ()
    """The names, in the module, of the parameters whose first dimension is the expert."""
    list_name: str = ""
    """The name, in the module, of the list of experts. Empty if the module is the list."""

    @property
    def is_list(self) -> bool:
        """Whether the experts are modules in a list."""
        return not self.stacked

    @property
    def experts(self) -> nn.ModuleList:
        """The list of experts."""
        found = self.module.get_submodule(self.list_name)
        assert isinstance(found, nn.ModuleList)
        return found


def experts(module: nn.Module, count: str = _COUNT, *, parallel_size: int | None = None) -> nn.Module:
    """Mark a module as an expert layer, and return it. `expert_parallel_size` then divides its experts.

    `parallel_size` is this size, if the config does not set it. Expert layers of transformers, and modules with a
    ModuleList named `experts`, need no mark.

    Stacked experts: the forward of the module is called as `forward(tokens, index, weights)`. Tokens are rows; `index`
    and `weights` have the experts of each token and their weights, as (tokens, k). It returns the weighted sum of the
    experts of each token. Parameters with `module.num_experts` (or the attribute that `count` names) as their first
    size are divided. The forward must read the number of experts from this attribute, because a rank calls it for its
    own experts only, which are numbered from 0.

    A list of experts: the module has one ModuleList, or is one. Its forward calls each expert with a tensor of rows,
    which returns as many rows of the same size. The forward runs twice ([Note: two runs of a forward]), so it must not
    change state.
    """
    if _list_in(module) is None and not isinstance(getattr(module, count, None), int):
        raise ValueError(
            f"onefold.experts: {type(module).__name__} has no number of experts in its attribute {count!r}, and not "
            "one ModuleList. Pass count=, the name of the attribute."
        )
    setattr(module, _MARK, count)
    setattr(module, _SIZE, parallel_size)
    return module


def requested_parallel_size(model: nn.Module) -> int | None:
    """Return the `parallel_size` of the marked layers of a model, or None. Raise if they request different sizes."""
    sizes = {name: size for name, module in model.named_modules() if (size := getattr(module, _SIZE, None)) is not None}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{size} ({name})" for name, size in sizes.items())
        raise ConfigError(f"expert layers ask for different parallel sizes: {shown}. Use one for all of them.")
    return next(iter(sizes.values()), None)


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the expert layers of a model, in module order."""
    found: list[ExpertLayer] = []
    for name, module in model.named_modules():
        layer = _layer_of(name, module)
        if layer is not None and not any(name.startswith(f"{other.name}.") for other in found if other.is_list):
            found.append(layer)
    return found


def _layer_of(name: str, module: nn.Module) -> ExpertLayer | None:
    """Return the expert layer that a module is, or None."""
    mark, called = getattr(module, _MARK, None), _is_called_as_in_transformers(module)
    count = mark or (_COUNT if called else "")
    number = getattr(module, count, None) if count else None
    list_name = _list_in(module)
    # A parameter with an entry for each expert may be next to a list of them.
    is_list = list_name is not None and len(module.get_submodule(list_name)) == number  # type: ignore[arg-type]
    if isinstance(number, int) and not is_list:
        shapes = {each: unsharded_shape(own) for each, own in module.named_parameters(recurse=False)}
        stacked = tuple(each for each, shape in shapes.items() if shape and shape[0] == number)
        if stacked:
            return ExpertLayer(name, module, number, count, stacked)
    by_name = list_name == _LIST and not _is_called_as_in_transformers(module.get_submodule(_LIST))
    if list_name is not None and (by_name or called or mark is not None):
        return ExpertLayer(name, module, len(module.get_submodule(list_name)), list_name=list_name)  # type: ignore[arg-type]
    if mark is not None:
        raise ConfigError(f"onefold.experts: {name} has no parameters of {number} stacked experts of its own.")
    return None


def _list_in(module: nn.Module) -> str | None:
    """Return the name of the list of experts in a module, or None.

    It has modules of one class, and is the only such list or is named `experts`.
    """
    lists = {"": module} if isinstance(module, nn.ModuleList) else dict(module.named_children())
    found = [
        name
        for name, each in lists.items()
        if isinstance(each, nn.ModuleList) and len(each) > 1 and len({type(expert) for expert in each}) == 1
    ]
    return found[0] if len(found) == 1 else _LIST if _LIST in found else None


def _is_called_as_in_transformers(module: nn.Module) -> bool:
    if not isinstance(getattr(module, _COUNT, None), int):
        return False
    return list(inspect.signature(module.forward).parameters)[:3] in _ARGUMENTS


def check_division(model: nn.Module, layers: list[ExpertLayer], size: int) -> None:
    """Raise if expert layers cannot be divided over `size` ranks."""
    if size == 1:
        return
    key = f"onefold.expert_parallel_size = {size}"
    if not layers:
        raise ConfigError(
            f"{key}: {type(model).__name__} has no expert layers. Use 1, or mark modules with experts by "
            "onefold.experts(module)."
        )
    for layer in layers:
        if layer.num_experts % size:
            raise ConfigError(f"{key} does not divide the {layer.num_experts} experts of {layer.name}. Use a divisor.")
        if layer.is_list:
            continue
        others = [*layer.module.named_parameters(), *layer.module.named_buffers()]
        for each, tensor in others:
            shape = unsharded_shape(tensor)
            if each not in layer.stacked and shape and shape[0] == layer.num_experts:
                raise ConfigError(
                    f"{key}: {layer.name}.{each} seems to have an entry for each expert, but only parameters of the "
                    "layer itself are divided. Make it a parameter of the layer, or use 1."
                )


def expert_parameters(model: nn.Module, layers: Iterable[ExpertLayer]) -> dict[str, ExpertOf]:
    """Return the parameters of experts by name."""
    found = {}
    for layer in layers:
        prefix = f"{layer.name}." if layer.name else ""
        found.update({f"{prefix}{name}": ExpertOf(layer.name, layer.num_experts) for name in layer.stacked})
        if layer.is_list:
            inside = f"{prefix}{layer.list_name}." if layer.list_name else prefix
            for name, _ in model.named_parameters():
                if name.startswith(inside):
                    number = int(name.removeprefix(inside).partition(".")[0])
                    found[name] = ExpertOf(layer.name, layer.num_experts, number)
    return found
