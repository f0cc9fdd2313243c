"""Models that were converted to torchao's `Float8Linear`, by the user or by Accelerate (`mixed_precision: fp8`).

These layers compute as torchao wrote them, in every stage. For all-gathers in FP8 under FSDP2, torchao wraps their
weights in a tensor subclass, which cannot be part of a flat parameter. onefold replaces these by the plain weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from onefold.log import logger


def unwrap_weights(model: nn.Module, optimizer: Any, parameters: Sequence[Any]) -> list[Any]:
    """Make weights that torchao has wrapped plain, in a model and its optimizer. Return `parameters` with plain ones.

    An optimizer may have been built before the conversion. Its Parameters then become those of the model again.
    """
    library = sys.modules.get("torchao.float8.fsdp_utils")
    if library is None:
        return list(parameters)
    wrapper: Any = library.WeightWithDynamicFloat8CastTensor
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    trained = [parameter for group in groups for parameter in group["params"]]
    by_address = {each.data_ptr(): each for each in (*trained, *parameters) if _is_plain(each, wrapper)}
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if isinstance(weight, wrapper):
            values = weight._tensor  # type: ignore[attr-defined]
            found = by_address.get(values.data_ptr())
            plain[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad) if found is None else found
            module._parameters["weight"] = plain[id(weight)]
    for group in groups:
        group["params"] = [plain.get(id(each), each) for each in group["params"]]
    if plain:
        logger.info(
            "torchao: %d layers multiply in FP8, and their weights are all-gathered in the data type of the model. For "
            "all-gathers in FP8, set fp8.enabled instead of converting the model.",
            len(plain),
        )
    return [plain.get(id(each), each) for each in parameters]


def _is_plain(each: Any, wrapper: Any) -> bool:
    return isinstance(each, nn.Parameter) and not isinstance(each, wrapper)
