"""Choose the cases of a test that vary in several dimensions.

    @covering(stage=(0, 1, 2, 3), dtype=("fp32", "bf16"), overlap=(True, False))
    def test_a_property(on_ranks, stage, dtype, overlap): ...

The first tier runs a small set of cases in which every two values of different dimensions meet at least once: here 8 of
16. All other combinations are marked slow, so `make test-slow` runs the rest of the product and nothing is lost. The
choice depends on nothing but the arguments, and the id of a case names its values: `stage 3-bf16-overlap`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[Any, ...]


def covering(
    *,
    strength: int = 2,
    always: Iterable[Case] = (),
    where: Callable[..., bool] | None = None,
    **dimensions: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrize a test over the product of the dimensions, whose first tier covers every pair of values.

    `more(value)` in a dimension keeps that value in the slow tier. `strength=1` asks only that every value occurs: then
    there are as many cases as the longest dimension has values. The cases of `always`, one value for each dimension,
    belong to the first tier in any case. `where` is called with the values by name, and combinations for which it is
    false are left out of both tiers.
    """
    given = {name: list(values) for name, values in dimensions.items()}
    names = list(given)
    product = [
        case
        for case in itertools.product(*([_plain(value) for value in values] for values in given.values()))
        if where is None or where(**dict(zip(names, case, strict=True)))
    ]
    late = [[_plain(value) for value in values if _is_slow(value)] for values in given.values()]
    early = [case for case in product if not any(value in slow for value, slow in zip(case, late, strict=True))]
    asked = list(always)
    for case in asked:
        if case not in product:
            raise ValueError(f"always: {case} is no combination of {', '.join(names)}.")
    chosen = choose(early, min(strength, len(names)), asked)
    params = [
        pytest.param(*case, id=_id(names, case), marks=[] if case in chosen else pytest.mark.slow) for case in product
    ]
    return pytest.mark.parametrize(",".join(names), params)


def choose(cases: Sequence[Case], strength: int, chosen: Sequence[Case] = ()) -> list[Case]:
    """Add cases to the chosen ones until all `strength` values that occur together in some case have met.

    The next one is always the case with the most new combinations; of several such, the one with the most new
    combinations of one value more, and then the first.
    """
    found = list(chosen)
    shown = [_combinations(case, strength) for case in cases]
    wider = [_combinations(case, strength + 1) for case in cases]
    left, seen = set().union(*shown), set()
    for case in found:
        left -= _combinations(case, strength)
        seen |= _combinations(case, strength + 1)
    while left:
        *_, place = max((len(left & shown[place]), len(wider[place] - seen), -place) for place in range(len(cases)))
        found.append(cases[-place])
        left -= shown[-place]
        seen |= wider[-place]
    return found


def _combinations(case: Case, strength: int) -> set[tuple[tuple[int, str], ...]]:
    """Name the values of each `strength` dimensions. A value is told apart by its text: some have no hash."""
    return set(itertools.combinations([(place, repr(value)) for place, value in enumerate(case)], strength))


def _plain(value: Any) -> Any:
    """Take a value out of `more(...)`."""
    if isinstance(value, type(pytest.param())):
        (value,) = value.values
    return value


def _is_slow(value: Any) -> bool:
    return isinstance(value, type(pytest.param())) and any(mark.name == "slow" for mark in value.marks)


def _id(names: Sequence[str], case: Case) -> str:
    return "-".join(_word(name, value) for name, value in zip(names, case, strict=True))


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool) or value in (None, ""):
        return name if value else f"no {name}"
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return f"{name} {'+'.join(map(str, value))}"
    return f"{name} {getattr(value, '__name__', value)}".replace("torch.", "")
