"""The experts of DeepSpeed's checkpoints.

[Note: DeepSpeed's experts]
With ep_size = n, a rank has 1/n of the experts, which it numbers from 0. Rank r has part r % n, or r // (W / n) with
`use_data_before_expert_parallelism`. A flat vector of experts is partitioned over the W / n ranks with the same part.
It may begin and end inside a layer, because DeepSpeed limits the size of groups of experts. The weights of each expert
are in `layer_<layer>_expert_<expert>_mp_rank_00_model_states.pt` too, under their names with the number among all
experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_NAME = re.compile(r"(?P<list>(?:.*\.)?deepspeed_experts\.)(?P<number>\d+)(?P<rest>\..*)")
# How far a weight may be from its master: the precision of bf16.
_ROUNDING = 2.0**-7


@dataclass(frozen=True)
class Owners:
    """The ranks that have partitions of a flat vector, and the part of the experts that they have."""

    ranks: Sequence[int]
    part: int = 0
    num_parts: int = 1

    def rename(self, names: Iterable[str], num_experts: Mapping[str, int]) -> dict[str, str]:
        """Return the names that parameters of rank 0 have among all experts, by what `count_experts` returned."""
        found = {name: match for name in names if (match := _NAME.fullmatch(name))}
        first = {each: self.part * number // self.num_parts for each, number in num_experts.items()}
        return {
            name: f"{match['list']}{int(match['number']) + first.get(match['list'], 0)}{match['rest']}"
            for name, match in found.items()
        }


def owners_of(partition_count: int, world_size: int, config: Mapping[str, Any]) -> list[Owners]:
    """Return the ranks of each part of the experts in a flat vector. Vectors without experts have one part."""
    num_parts = world_size // partition_count
    if world_size % partition_count:
        raise ValueError(f"partition_count is {partition_count}, which does not divide the {world_size} ranks")
    if config.get("use_data_before_expert_parallelism"):
        by_part = [range(part * partition_count, (part + 1) * partition_count) for part in range(num_parts)]
    else:
        by_part = [range(part, world_size, num_parts) for part in range(num_parts)]
    return [Owners(ranks, part, num_parts) for part, ranks in enumerate(by_part)]


def read_expert_files(
    folder: Path, num_experts: Sequence[int], read: Callable[[Path], dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return the weights in the files of experts. Raise if one is missing."""
    found: dict[str, torch.Tensor] = {}
    files = {
        (int(match[1]), int(match[2])): file for file in folder.iterdir() if (match := EXPERT_FILE.fullmatch(file.name))
    }
    if any(number > len(files) for number in num_experts):
        raise ValueError(f"{folder}: num_experts is {list(num_experts)}, but there are {len(files)} files of experts")
    expected = {(layer, expert) for layer, number in enumerate(num_experts) for expert in range(number)}
    if files.keys() != expected:
        missing, more = sorted(expected - files.keys()), sorted(files.keys() - expected)
        raise ValueError(f"{folder}: files of experts (layer, expert) are missing: {missing}, or too many: {more}")
    for place in sorted(files):
        for name, value in read(files[place]).items():
            match = _NAME.fullmatch(name)
            if match is None or int(match["number"]) != place[1] or not isinstance(value, torch.Tensor):
                raise ValueError(f"{files[place]}: {name!r} is not a parameter of expert {place[1]}")
            found[name] = value
    return found


def count_experts(weights: Iterable[str]) -> dict[str, int]:
    """Return the number of experts in each list, from the names of all weights of experts."""
    experts = {(match["list"], match["number"]) for name in weights if (match := _NAME.fullmatch(name))}
    return Counter(name for name, _ in experts)


def check_weights(
    folder: Path, weights: Mapping[str, torch.Tensor], masters: Iterator[tuple[str, Callable[[], torch.Tensor]]]
) -> None:
    """Raise if the weights of experts differ from their masters, because these would belong to other experts."""
    for name, assemble in masters:
        if not _NAME.fullmatch(name):
            continue
        weight = weights.get(name)
        if weight is None or not torch.allclose(weight.float(), assemble(), rtol=_ROUNDING, atol=1e-6):
            raise ValueError(f"{folder}: the master weight of {name!r} is not that of its file of experts")
