"""What a job on many nodes sends in a step, by the formulas of docs/design.md: one level, two levels, rings, ZeRO++.

Bytes that leave a node, in parts of M (the bytes of the parameters in 16 bits), with nothing kept unsharded and one
micro-step; and for one unit the messages that a rank sends to other nodes, and how many follow each other.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.table import format_table

# A value as int8 or int4, with its share of the scale of a block of 256, in parts of 16 bits.
INT8, INT4 = 260 / 512, 132 / 512


@dataclass(frozen=True)
class Way:
    """How collectives run: what leaves a node in a step, and messages of one gather and one reduction."""

    name: str
    left: float
    messages: float
    in_a_row: int


def ways(nodes: int, ranks: int) -> list[Way]:
    """For so many nodes of so many ranks."""
    world, others = nodes * ranks, 1 - 1 / nodes
    far = world - ranks
    two = {"messages": 2 * (nodes - 1), "in_a_row": 4}
    return [
        Way("one level: each rank straight to all others", 3 * ranks * others, 2 * far, 2),
        Way("rings over all ranks, sums in bf16", 3 * (1 - 1 / world), 2 * (world - 1) / ranks, 2 * (world - 1)),
        Way("two levels: sums cross in fp32 (default)", (2 + 2) * others, **two),
        Way("two levels: sums cross in bf16", (2 + 1) * others, **two),
        Way("two levels, hpZ", (1 + 2) * others, **two),
        Way("two levels, qwZ", (2 * INT8 + 2) * others, **two),
        Way("two levels, qgZ", (2 + INT4) * others, **two),
        Way("two levels, all three", (INT8 + INT4) * others, **two),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--nodes", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a node (default: %(default)s)")
    parser.add_argument("--billions", type=float, default=7.0, help="parameters, 1e9 (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.nodes < 2 or arguments.ranks < 1 or arguments.billions <= 0:
        parser.error("there must be two nodes, a rank on each and some parameters")
    moved = 2 * arguments.billions
    rows = [
        [way.name, f"{way.left:.2f} M", f"{way.left * moved:.1f}", f"{way.messages:.0f}", str(way.in_a_row)]
        for way in ways(arguments.nodes, arguments.ranks)
    ]
    header = ["stage 3", "leaves a node", f"GB of {arguments.billions:g}B", "messages of a rank", "in a row"]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
