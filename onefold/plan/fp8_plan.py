"""The decisions about FP8 products and all-gathers."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.config import Config, fp8_gather_conflict


@dataclass(frozen=True)
class Fp8Plan:
    """FP8 products of linear layers."""

    by_row: bool = False
    """Each row has a scale, instead of each tensor."""
    skip: tuple[str, ...] = ()
    """Name patterns of layers that do not multiply in FP8."""
    gathers: bool = False
    """The weights of these layers are all-gathered in FP8."""
    emulate: bool = False
    """Values are rounded to FP8 and multiplied in fp32."""


def make_fp8_plan(config: Config, num_shards: int) -> Fp8Plan | None:
    """Return the plan of the section `fp8`. None: it is disabled."""
    fp8 = config.fp8
    if not fp8.enabled:
        return None
    can_gather = num_shards > 1 and config.zero_optimization.stage == 3 and fp8_gather_conflict(config) is None
    return Fp8Plan(fp8.recipe == "rowwise", fp8.skip, can_gather and fp8.all_gather is not False, fp8.emulate)
