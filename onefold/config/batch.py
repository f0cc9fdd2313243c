"""The batch triangle: train = micro x accumulation x ranks."""

from dataclasses import dataclass

from onefold.config.errors import ConfigError
from onefold.config.schema import Config


@dataclass(frozen=True)
class Batch:
    """Sizes that agree: `train` samples a step are `accumulation` micro-batches of `micro` on each of `world` ranks."""

    train: int
    micro: int
    accumulation: int
    world: int


def solve_batch(config: Config, world_size: int) -> Batch:
    """Fills in what the config leaves out, exactly or not at all.

    Any two of the three keys give the third; alone, `train_batch_size` or `train_micro_batch_size_per_gpu` goes with an
    accumulation of 1.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size}: there is at least one rank")
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        has = "" if accumulation is None else f" beside gradient_accumulation_steps {accumulation}"
        raise ConfigError(f"the batch size is open: add train_micro_batch_size_per_gpu or train_batch_size{has}")
    if accumulation is None and (train is None or micro is None):
        accumulation = 1
    if train is None:
        assert micro is not None
        assert accumulation is not None
        train = micro * accumulation * world_size
    elif micro is None:
        assert accumulation is not None
        micro = _divide(train, accumulation, world_size, "train_micro_batch_size_per_gpu", "accumulation")
    elif accumulation is None:
        accumulation = _divide(train, micro, world_size, "gradient_accumulation_steps", "micro")
    product = micro * accumulation * world_size
    if product != train:
        raise ConfigError(
            f"train_batch_size {train} is not micro {micro} x accumulation {accumulation} x world {world_size} = "
            f"{product}; write train_batch_size {product}, or leave one of the three keys out"
            f"{_rank_hint(train, micro * accumulation)}"
        )
    return Batch(train, micro, accumulation, world_size)


def _divide(train: int, by: int, world_size: int, missing: str, name: str) -> int:
    product = by * world_size
    if train % product:
        nearest = max(1, round(train / product)) * product
        raise ConfigError(
            f"{missing} = train_batch_size {train} / ({name} {by} x world {world_size} = {product}) is "
            f"{train / product:.4g}, not a whole number; write train_batch_size {nearest}{_rank_hint(train, by)}"
        )
    return train // product


def _rank_hint(train: int, by: int) -> str:
    """The common accident: the ranks do not know of each other, so each of them is a world of 1."""
    return f" (it fits {train // by} ranks: were they all started?)" if train % by == 0 else ""
