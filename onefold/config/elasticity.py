"""Elastic batch sizes: one train batch that many numbers of ranks divide into micro-batches, by DeepSpeed's rules.

[Note: elastic batch sizes]
A train batch is the largest product of a base and a highly composite number that is not above `max_train_batch_size`.
Bases are the micro-batch sizes and their least common multiple. A number of ranks is valid if it divides the train
batch into multiples of a micro-batch size. The train batch with the most valid numbers is used, and the larger of two
with equally many, or the smaller without `prefer_larger_batch`. Version 0.1 counts ranks. Version 0.2 counts nodes of
`num_gpus_per_node` GPUs, of which `model_parallel_size` compute parts of the same samples. For a number of ranks that
is not valid, also for one outside of `min_gpus` and `max_gpus`, version 0.2 uses the largest train batch of that number
alone. Version 0.1 raises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from onefold.config.keys import key, noticed
from onefold.errors import ConfigError

_if_enabled = partial(key, switch="enabled")
_VERSIONS = (0.1, 0.2)
# The divisors of a batch are found in at most as many steps as its square root.
_LARGEST_BATCH = 10**12
# The first 38 highly composite numbers (OEIS A002182): each has more divisors than all smaller numbers.
_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


class ElasticityError(ConfigError):
    """An elastic config that cannot be used."""


class ElasticityConfigError(ElasticityError):
    """Keys of an elastic config that are missing or contradict each other."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A number of ranks that does not divide the elastic train batch."""


@dataclass(frozen=True)
class Elasticity:
    """One train batch for several numbers of ranks. The micro-batch and the accumulation follow from that number."""

    enabled: bool = key(
        False,
        "Compute the train batch from this section. The keys of the batch must be left out. Needs "
        "`max_train_batch_size` and `micro_batch_sizes`.",
    )
    max_train_batch_size: int | None = _if_enabled(None, "Maximum train batch.", minimum=1, maximum=_LARGEST_BATCH)
    micro_batch_sizes: tuple[int, ...] = _if_enabled((), "Micro-batch sizes to choose from.", minimum=1)
    min_gpus: int = _if_enabled(1, "Smallest number of ranks for which the train batch is chosen.", minimum=1)
    max_gpus: int = _if_enabled(10_000, "Largest number of ranks for which the train batch is chosen.", minimum=1)
    num_gpus_per_node: int = _if_enabled(
        1, "Ranks per node. Version 0.2 counts whole nodes, and rounds `min_gpus` and `max_gpus` down.", minimum=1
    )
    model_parallel_size: int = _if_enabled(
        1,
        "Number of ranks that compute parts of the same samples, in version 0.2. It must be 1 or "
        "`sequence_parallel_size`.",
        minimum=1,
    )
    min_time: int = noticed(
        0,
        "Minimum number of minutes between two changes.",
        "the launcher decides when a job restarts, and the batch does not depend on it",
    )
    prefer_larger_batch: bool = _if_enabled(
        True,
        "Of train batches with equally many valid numbers of ranks, use the largest. false: the smallest.",
        aliases=("prefer_large_batch",),
    )
    ignore_non_elastic_batch_info: bool = _if_enabled(
        False, "Ignore the keys of the batch. false: they are an error together with this section."
    )
    version: float = _if_enabled(0.2, "Version of the rules, 0.1 or 0.2.")


@dataclass(frozen=True)
class ElasticBatch:
    """An elastic train batch, and the numbers of data-parallel ranks that divide it, in ascending order."""

    train: int
    valid: tuple[int, ...]
    instead_of: "ElasticBatch | None" = None
    """The train batch of other numbers of ranks, for which that of this job is not valid."""

    @property
    def names(self) -> str:
        """The valid numbers as text."""
        return ", ".join(map(str, self.valid)) or "none"

    def micro(self, elastic: Elasticity, num_ranks: int) -> int:
        """Return the largest micro-batch for a valid number of data-parallel ranks."""
        per_rank = self.train // num_ranks
        return max(size for size in elastic.micro_batch_sizes if per_rank % size == 0)


def check_elasticity(elastic: Elasticity, batch_keys: Sequence[str] = ()) -> None:
    """Raise for the first contradiction in an enabled section, or with the given keys of the batch."""
    problem = _contradiction(elastic, batch_keys) if elastic.enabled else None
    if problem is not None:
        raise ElasticityConfigError(problem)


def _contradiction(elastic: Elasticity, batch_keys: Sequence[str]) -> str | None:
    limit, sizes, parallel = elastic.max_train_batch_size, elastic.micro_batch_sizes, elastic.model_parallel_size
    if limit is None:
        return "elasticity.enabled needs elasticity.max_train_batch_size. Set the largest batch that converges."
    if not sizes:
        return "elasticity.enabled needs elasticity.micro_batch_sizes. List the sizes that fit the device memory."
    if elastic.version not in _VERSIONS:
        return f"elasticity.version = {elastic.version:g} is not known. Write 0.1 or 0.2."
    if elastic.version == 0.1 and parallel > 1:
        return f"elasticity.model_parallel_size = {parallel} needs elasticity.version 0.2. Set the version."
    if elastic.num_gpus_per_node % parallel and elastic.version == 0.2:
        return (
            f"elasticity.model_parallel_size = {parallel} does not divide elasticity.num_gpus_per_node = "
            f"{elastic.num_gpus_per_node}. Change one of them."
        )
    if elastic.max_gpus < max(elastic.min_gpus, _gpus_per_node(elastic)):
        return (
            f"elasticity.max_gpus = {elastic.max_gpus} is below min_gpus = {elastic.min_gpus} or num_gpus_per_node = "
            f"{elastic.num_gpus_per_node}. Raise it."
        )
    per_node = _ranks_per_node(elastic)
    if max(sizes) > limit // per_node:
        return (
            f"elasticity.micro_batch_sizes contains {max(sizes)}, but max_train_batch_size = {limit} allows at most "
            f"{limit // per_node} for each of the {per_node} ranks of a node. Remove it, or raise the maximum."
        )
    if batch_keys and not elastic.ignore_non_elastic_batch_info:
        return (
            f"{', '.join(batch_keys)} and elasticity.enabled are both given, but elasticity determines the batch. "
            "Leave these keys out, or set elasticity.ignore_non_elastic_batch_info to ignore them."
        )
    return None


def solve_elastic(elastic: Elasticity, num_ranks: int | None = None) -> ElasticBatch:
    """Return the elastic train batch. `num_ranks` is the number of data-parallel ranks of this job, if there is one.

    Raise if `num_ranks` is not valid.
    """
    assert elastic.max_train_batch_size is not None
    per_node, gpus_per_node = _ranks_per_node(elastic), _gpus_per_node(elastic)
    first, last = max(1, elastic.min_gpus // gpus_per_node), elastic.max_gpus // gpus_per_node
    sizes, limit = elastic.micro_batch_sizes, elastic.max_train_batch_size // per_node
    bases = {*sizes, _common_multiple(sizes, limit)}
    found = [_most_divisible(base, limit) for base in bases]
    sign = 1 if elastic.prefer_larger_batch else -1
    valid, batch = max(
        ((_valid_numbers(batch, sizes, first, last), batch) for batch in found),
        key=lambda entry: (len(entry[0]), sign * entry[1]),
    )
    solved = ElasticBatch(batch * per_node, tuple(number * per_node for number in valid))
    if not valid and num_ranks is None:
        raise ElasticityConfigError(
            f"elasticity: no number of GPUs from {elastic.min_gpus} to {elastic.max_gpus} divides a train batch of at "
            f"most {elastic.max_train_batch_size}. Change min_gpus, max_gpus or micro_batch_sizes."
        )
    if num_ranks is None or num_ranks in solved.valid:
        return solved
    adapted = _adapt(elastic, num_ranks, solved) if elastic.version == 0.2 else None
    if adapted is None:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {num_ranks} data-parallel ranks do not divide the train batch {solved.train} into "
            f"micro-batches of {', '.join(map(str, sizes))} within min_gpus = {elastic.min_gpus} and max_gpus = "
            f"{elastic.max_gpus}. Valid numbers of ranks are {solved.names}. Start one of these."
        )
    return adapted


def _adapt(elastic: Elasticity, num_ranks: int, usual: ElasticBatch) -> ElasticBatch | None:
    """Return the train batch for one number of ranks alone, or None if no micro-batch is small enough."""
    assert elastic.max_train_batch_size is not None
    steps = [size * num_ranks for size in elastic.micro_batch_sizes]
    batches = [elastic.max_train_batch_size // step * step for step in steps if step <= elastic.max_train_batch_size]
    if not batches:
        return None
    return ElasticBatch(max(batches) if elastic.prefer_larger_batch else min(batches), (num_ranks,), usual)


def _gpus_per_node(elastic: Elasticity) -> int:
    """Return the number of GPUs that are added or removed together."""
    return elastic.num_gpus_per_node if elastic.version == 0.2 else 1


def _ranks_per_node(elastic: Elasticity) -> int:
    """Return the number of data-parallel ranks that are added or removed together."""
    return _gpus_per_node(elastic) // elastic.model_parallel_size


def _common_multiple(sizes: Sequence[int], limit: int) -> int:
    """Return the least common multiple of the sizes, or the first size if it is above `limit`."""
    multiple = 1
    for size in sizes:
        multiple = math.lcm(multiple, size)
        if multiple > limit:
            return sizes[0]
    return multiple


def _most_divisible(base: int, limit: int) -> int:
    """Return the largest product of `base` and a highly composite number that is not above `limit`."""
    return base * max(number for number in _HIGHLY_COMPOSITE if number * base <= limit)


def _valid_numbers(batch: int, sizes: Sequence[int], first: int, last: int) -> list[int]:
    """Return the numbers from `first` to `last` that divide the batch into multiples of a micro-batch size."""
    found: set[int] = set()
    for size in set(sizes):
        if batch % size == 0:
            found |= _divisors(batch // size)
    return sorted(number for number in found if first <= number <= last)


def _divisors(number: int) -> set[int]:
    small = {divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0}
    return small | {number // divisor for divisor in small}
