"""Ranks agree before they train: whatever must be equal on all ranks and is not, is named by all of them at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, more, net, rank, start, train
from torch import nn

import onefold
from onefold.comm import Disagreement, consensus, world_detector
from onefold.comm.consensus import first_difference


class Two(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def layers(width: int = 32, depth: int = 2) -> nn.Sequential:
    inner = (nn.Linear(width, width) for _ in range(depth))
    return nn.Sequential(nn.Linear(16, width), *inner, nn.Linear(width, 16))


def model_of(kind: str, odd: bool) -> nn.Module:
    torch.manual_seed(0)
    if kind == "order":
        return Two("ba" if odd else "ab")
    if kind == "leaf modules":
        nested = nn.Sequential(layers(), nn.Linear(16, 16))
        nested[0]._z3_leaf = odd
        return nested
    made = layers(48 if kind == "width" and odd else 32, 3 if kind == "depth" and odd else 2)
    if kind == "frozen" and odd:
        made[0].requires_grad_(False)
    if kind == "tied" and odd:
        made[2].weight = made[1].weight
    if kind == "buffer":
        made.register_buffer("mask", torch.ones(4 if odd else 3))
    if kind == "model in bf16" and odd:
        made.bfloat16()
    return made


def settings_of(kind: str, odd: bool, stage: int) -> dict[str, Any]:
    more: dict[str, Any] = {"zero_optimization": {}, "log_level": "warning"}
    zero = more["zero_optimization"]
    if odd and kind == "stage":
        stage = 1
    if odd:
        more |= {
            "clip": {"gradient_clipping": 0.01},
            "bf16": {"bf16": {"enabled": True}},
            "optimizer": {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}},
            "lr": {"optimizer": {"type": "AdamW", "params": {"lr": 0.02}}},
            "accumulation": {"gradient_accumulation_steps": 2},
            "micro-batch": {"train_micro_batch_size_per_gpu": 3},
            "scheduler": {"scheduler": {"type": "WarmupLR", "params": {}}},
            "collective": {"onefold": {"collective": "native"}},
        }.get(kind, {})
    if odd and kind == "persistence":
        zero["stage3_param_persistence_threshold"] = 600
    if odd and kind == "bucket":
        zero["reduce_bucket_size"] = 1000
    if not odd and kind == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    if "offload to other paths" in kind:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": odd}
        more["checkpoint"] = {"keep_last": 3 if odd else 4}
        more["log_level"] = "error" if odd else "warning"
    return config(stage, **more)


def initialise(kind: str, stage: int) -> tuple[str, str, float]:
    """Class and text of the error that `initialize` raised, and its seconds."""
    odd = rank() == dist.get_world_size() - 1
    model = model_of(kind, odd)
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others, "lr": 1.0}]
    begun = time.monotonic()
    try:
        onefold.initialize(
            model=model,
            config=settings_of(kind, odd, stage),
            model_parameters=groups if odd and kind == "groups" else None,
        )
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


KINDS = {
    "width": "rank 1 differs from rank 0: parameter 0.weight has shape (48, 16), rank 0's (32, 16)",
    "order": "different order: it has parameter b.weight where rank 0 has parameter a.weight",
    "depth": "parameter 3.weight has shape (32, 32), rank 0's (16, 32)",
    "frozen": "parameter 0.weight has requires_grad False, rank 0's True",
    "tied": "parameter 2.weight has the weights of 1.weight, rank 0's nothing",
    "buffer": "buffer mask has shape (4,), rank 0's (3,)",
    "model in bf16": "parameter 0.weight has dtype torch.bfloat16, rank 0's torch.float32",
    "leaf modules": "it has unit 0, but rank 0 does not",
    "stage": "the config has zero_optimization.stage 1, rank 0's",
    "clip": "the config has gradient_clipping 0.01, rank 0's 0.0",
    "bf16": "the config has bf16.enabled True, rank 0's False",
    "optimizer": "the optimizer has type SGD, rank 0's AdamW",
    "lr": "parameter group 0 has lr 0.02, rank 0's 0.01",
    "groups": "it has parameter group 1, but rank 0 does not",
    "accumulation": "the batch has accumulation 2, rank 0's 1",
    "micro-batch": "the batch has micro-batch 3, rank 0's 4",
    "scheduler": "the config has scheduler.type 'WarmupLR', rank 0's nothing",
    "collective": "the config has onefold.collective 'native', rank 0's 'auto'",
    "persistence": "the config has zero_optimization.stage3_param_persistence_threshold 600, rank 0's 0",
    "bucket": "the config has zero_optimization.reduce_bucket_size 1000, rank 0's 500000000",
    "offload": "the config has zero_optimization.offload_optimizer.device 'none', rank 0's 'cpu'",
}


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(kind, 3) if number % 2 else (kind, 2) for number, kind in enumerate(KINDS)]
    + [more(kind, 2) if number % 2 else more(kind, 3) for number, kind in enumerate(KINDS)],
)
def test_what_differs_is_named_on_every_rank(on_ranks, kind, stage):
    found = on_ranks(2, initialise, kind, stage)
    assert {name for name, _, _ in found} == {"Disagreement"}, found
    assert found[0][1] == found[1][1]
    assert KINDS[kind] in found[0][1]
    assert "onefold.initialize" in found[0][1]
    assert max(seconds for _, _, seconds in found) < 10


def test_of_three_ranks_those_that_differ_are_named(on_ranks):
    for name, text, _ in on_ranks(3, initialise, "width", 3):
        assert (name, "rank 2 differs from rank 0: parameter 0.weight" in text) == ("Disagreement", True), text


def goes_on() -> list[str]:
    """After ranks were told, they may try again, together; local facts are nobody's business."""
    told = [initialise("width", 3)[0], initialise("offload to other paths", 2)[0]]
    engine = start(net(), config(3))
    train(engine, 1)
    engine.destroy()
    return told


def test_ranks_that_were_told_try_again_and_local_facts_may_differ(on_ranks):
    assert on_ranks(2, goes_on) == [["Disagreement", ""]] * 2


def keys_in_the_store() -> int:
    dist.barrier()
    found = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return found


def keys_after_engines() -> list[int]:
    counts = []
    for _ in range(4):
        start(net(), config(2)).destroy()
        counts.append(keys_in_the_store())
    return counts


def numbers_spelt(spelling: int) -> None:
    settings = config(3, log_level="warning")
    settings["optimizer"]["params"]["weight_decay"] = 0 if rank() == spelling else 0.0
    start(net(), settings).destroy()


def test_whole_numbers_may_be_spelt_as_floats(on_ranks):
    on_ranks(2, numbers_spelt, 1)


def loading(folder: str, way: str) -> str:
    engine = start(net(), config(3, log_level="warning"))
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(folder, tag="b")
    given = {"tag": {"tag": "ab"[rank()]}, "flag": {"load_optimizer_states": rank() == 0}}[way]
    with pytest.raises(Disagreement) as caught:
        engine.load_checkpoint(folder, **given)
    engine.load_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("tag", "the call has tag b, rank 0's a. Call load_checkpoint with the same arguments"),
        ("flag", "the call has load_optimizer_states False, rank 0's True"),
    ],
)
def test_calls_that_load_differently_are_named(on_ranks, tmp_path, way, words):
    found = on_ranks(2, loading, str(tmp_path), way)
    assert found[0] == found[1]
    assert words in found[0]


def test_comparing_leaves_no_keys_behind(on_ranks):
    counts = on_ranks(2, keys_after_engines)[0]
    boards = 1  # each engine's board keeps a note or two
    assert counts[3] - counts[1] <= 2 * 2 * boards, counts


def test_first_difference_in_words():
    a, b = ("parameter a", {"shape": "(1,)"}), ("parameter b", {"shape": "(1,)"})
    assert first_difference([a, b], [a]) == "it has no parameter b, but rank 0 does"
    assert first_difference([a], [a, b]) == "it has parameter b, but rank 0 does not"
    assert first_difference([a, b], [b]) == "it has no parameter a, but rank 0 does"
    assert first_difference([a, b], [b, a]) == "different order: it has parameter b where rank 0 has parameter a"
    other = ("parameter a", {"shape": "(2,)"})
    assert first_difference([a, b], [other, b]) == "parameter a has shape (2,), rank 0's (1,)"


# -- ranks that do not come --------------------------------------------------------------------------------------


def heard(act: Callable[[], None]) -> tuple[str, str, float, str]:
    """Class and text of the error, its seconds, and what was logged meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    begun = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun, "\n".join(said)
    finally:
        logging.getLogger("onefold").removeHandler(handler)
    return "", "", time.monotonic() - begun, "\n".join(said)


def never_comes() -> tuple[str, str, float, str]:
    consensus.WARN_SECONDS, consensus.TIMEOUT_SECONDS = 1.0, 4.0
    if rank() == 1:
        time.sleep(6)
        return "", "", 0.0, ""
    return heard(lambda: start(net(), config(2)))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_a_warning_then_in_an_error(own_ranks):
    name, text, _, said = own_ranks(2, never_comes)[0]
    assert name == "Disagreement"
    assert "rank 1 did not reach it within 4 s" in text
    assert "rank 0 has waited" in said
    assert "for rank 1" in said


def ends_before() -> tuple[str, str, float, str]:
    if rank() == 1:
        start(net(), config(2)).destroy()
        world_detector().report_end()
        return "", "", 0.0, ""
    start(net(), config(2)).destroy()
    return heard(lambda: start(net(), config(2)))


def test_a_rank_that_has_ended_is_named_at_once(own_ranks):
    name, text, seconds, _ = own_ranks(2, ends_before)[0]
    assert name == "Disagreement"
    assert "rank 1 ended before reaching it" in text
    assert seconds < 10


def built_apart(kind: str) -> tuple[str, str, float, str]:
    """Models under zero.Init that differ, so that they are met before `initialize`."""

    def act() -> None:
        with onefold.zero.Init():
            made = model_of(kind, rank() == 1)
        start(made, config(3))

    return heard(act)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("width", ["rank 1 differs from rank 0: Linear", "weight (48, 16)", "rank 0's (32, 16)"]),
        ("depth", ["rank 0", "rank 1"]),
    ],
)
def test_models_that_differ_under_init_are_named(own_ranks, kind, words):
    for name, text, seconds, _ in own_ranks(2, built_apart, kind):
        assert name == "Disagreement", text
        assert [word for word in words if word not in text] == []
        assert seconds < 10
