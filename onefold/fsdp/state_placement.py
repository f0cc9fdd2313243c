"""Which optimizer states are offloaded: a fraction of them, or as many as must be. No tensors.

[Note: the ratio]
Parameters are offloaded from the last to the first until they have the fraction `ratio` of all elements, so the choice
is the same on every rank, and a non-blocking step has the first modules of the next forward ready at once. Small
parameters stay on the device: they need next to no memory, and a copy takes as long as that of a larger one. The choice
does not change any result: the device steps all states with the same kernels.

With `ratio="auto"` the ratio is chosen in the first step, when the first backward has shown how much device memory
training needs. Each rank computes the fraction of its states that does not fit, and the largest one is used by all.
"""

from __future__ import annotations

from collections.abc import Sequence

# Parameters with fewer elements, over all ranks, keep their states on the device.
MIN_NUMEL = 1 << 16
# The part of the device memory that "auto" leaves free: for fragmentation, and for steps that need more than the first.
HEADROOM = 0.1


def choose_offloaded(numels: Sequence[int], ratio: float, min_numel: int) -> list[bool]:
    """Return for each parameter, given its elements over all ranks, whether its states are offloaded.

    Parameters with fewer than `min_numel` elements are not.
    """
    wanted, chosen = ratio * sum(numels), 0
    offloaded = [False] * len(numels)
    for index in reversed(range(len(numels))):
        if numels[index] >= min_numel and chosen < wanted:
            offloaded[index] = True
            chosen += numels[index]
    return offloaded


def ratio_that_fits(state_bytes: int, usable: int, peak: int, reserved: int) -> float:
    """Return the fraction of the states that must be offloaded.

    Of `usable` bytes of device memory, training without any states needs `peak`, and streaming states through the
    device needs `reserved`.
    """
    if state_bytes == 0:
        return 0.0
    room = usable * (1 - HEADROOM) - peak
    if room >= state_bytes:
        return 0.0
    return min(1.0, max(0.0, 1 - max(0.0, room - reserved) / state_bytes))
