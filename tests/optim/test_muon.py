"""Optimizers of whole matrices: Muon with the same bits in every stage, on any ranks, as torch's on one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from models import (
    Net,
    Trace,
    batches,
    config,
    first_difference,
    more,
    net,
    precision,
    rank,
    start,
    tiers_of,
    train,
    weights_of,
)
from torch import nn

import onefold
from onefold.config import ConfigError, load_config
from onefold.optim import offloaded_step
from onefold.optim.choose import check_shardable, choose
from onefold.optim.matrix_rules import POLAR_EXPRESS, QUINTIC, orthogonalize
from onefold.plan import Layout
from onefold.plan.matrices import Matrix, MatrixError, choose_owners, count_sent, holders, matrices_of
from onefold.plan.optimizer_spec import OptimizerSpec, make_optimizer_spec
from onefold.tools.estimate.forecast import forecast
from onefold.tools.estimate.machines import adjust, find_machine
from onefold.tools.estimate.models import find_model
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting
from onefold.utils import safe_get_full_optimizer_state

WIDTH = 48  # a matrix of which lies on several ranks


def muon(**params: Any) -> dict[str, Any]:
    """AdamW with torch's defaults."""
    adamw = {"adam_lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
    return {"type": "Muon", "params": {"muon_lr": 0.02, "weight_decay": 0.01, **adamw, **params}}


def wide(**shape: Any) -> Net:
    return net(width=WIDTH, **shape)


# -- exactness ---------------------------------------------------------------------------------------------------------


def run_stages(dtype: str, accumulation: int, zero: dict[str, Any], **params: Any) -> dict[int, Trace]:
    traces = {}
    for stage in range(4):
        settings = config(
            stage,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=0.3,
            optimizer=muon(**params),
            zero_optimization=zero,
            **precision(dtype),
        )
        engine = start(wide(), settings)
        traces[stage] = train(engine, 3 * accumulation)
        engine.destroy()
    return traces


@covering(world=(1, 3, more(2), more(4)), dtype=("fp32", "bf16", more("fp16")), strength=1)
def test_stages_are_bit_equal(on_ranks, world, dtype):
    results = on_ranks(world, run_stages, dtype, 1, {})
    for traces in results:
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"
        assert first_difference(traces[3].weights, results[0][3].weights) is None


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_stages_are_bit_equal_in_small_buckets_with_other_coefficients(on_ranks, overlap):
    zero = {"overlap_comm": overlap, "allgather_bucket_size": 20_000, "reduce_bucket_size": 20_000}
    params = {"ns_coefficients": "polar_express", "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    for traces in on_ranks(3, run_stages, "bf16", 1, zero, **params):
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"


def beside_torch(stage: int, way: str) -> str | None:
    """The engine on one rank, or on several with the same batches, and plain torch."""
    torch.manual_seed(3)
    model, plain = Net(width=WIDTH), Net(width=WIDTH)
    plain.load_state_dict(model.state_dict())

    def both(of: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for name, p in of.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
        taken = {id(p) for p in matrices}
        rest = [p for p in of.parameters() if id(p) not in taken]
        return [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01, fused=True),
        ]

    if way == "by config":
        engine = start(model, config(stage, optimizer=muon()))
    elif way == "by groups":
        groups = [
            {"params": group["params"], "use_muon": isinstance(each, torch.optim.Muon), "lr": group["lr"]}
            for each in both(model)
            for group in each.param_groups
        ]
        engine = start(model, config(stage, optimizer=muon()), model_parameters=groups)
    else:
        engine = start(model, config(stage, optimizer=None), optimizer=both(model))
    optimizers = both(plain)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randint(0, 31, (4, 7), generator=generator)
        engine.backward(engine(x, x))
        engine.step()
        plain(x, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return first_difference(weights_of(engine.module), weights_of(plain))


@covering(stage=(0, 1, 2, 3), way=("by config", "by groups", "as torch's own"), strength=1)
def test_it_is_torchs_muon_and_adamw_to_the_bit(on_ranks, stage, way):
    for told in on_ranks(1, beside_torch, stage, way):
        assert told is None


def run_wires(zero: dict[str, Any]) -> Trace:
    return train(start(wide(), config(3, optimizer=muon(), zero_optimization=zero, **precision("bf16"))), 3)


@pytest.mark.slow
def test_replica_groups_and_secondary_shards_go_with_it(on_ranks):
    plain, hpz, mics = (
        on_ranks(4, run_wires, zero) for zero in ({}, {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2})
    )
    assert [first_difference(*pair) for pair in zip(hpz, plain, strict=True)] == [None] * 4
    assert all(first_difference(each.weights, mics[0].weights) is None for each in mics)
    # Two ranks are a branch of the tree of four. Only the norm adds the squares of other shards.
    found, expected = ((each.losses, each.weights) for each in (mics[0], plain[0]))
    assert first_difference(found, expected) is None
    assert mics[0].norms == pytest.approx(plain[0].norms, rel=1e-12)


def products_after_a_start() -> tuple[bool, bool]:
    """Whether torch computes with oneDNN when an engine stands, and after a step."""
    engine = start(wide(), config(2, optimizer=muon()))
    before = torch.backends.mkldnn.enabled
    train(engine, 1)
    return before, torch.backends.mkldnn.enabled


def test_no_step_changes_how_later_ones_are_computed(own_ranks):
    for before, after in own_ranks(1, products_after_a_start):
        assert before == after


def under_init() -> str | None:
    """A model that is sharded while it is built: what is a matrix is known all the same."""
    settings, traces = config(3, optimizer=muon(), **precision("bf16")), []
    for sharded in (False, True):
        torch.manual_seed(5)
        with onefold.zero.Init(config_dict_or_path=settings, enabled=sharded):
            model = Net(width=WIDTH)
        engine = start(model, settings)
        assert len(engine.state.step.matrices.matrices) == 3
        traces.append(train(engine, 2))
        engine.destroy()
    return first_difference(*traces)


def test_a_model_may_be_sharded_while_it_is_built(on_ranks):
    assert on_ranks(2, under_init) == [None, None]


def norms(optimizer: dict[str, Any]) -> list[float | None]:
    return train(start(wide(), config(2, optimizer=optimizer, gradient_clipping=0.01)), 1).norms


def test_the_norm_is_that_of_the_gradient_and_not_of_what_becomes_of_it(on_ranks):
    found, others = on_ranks(2, norms, muon()), on_ranks(2, norms, {"type": "AdamW", "params": {"lr": 1e-3}})
    assert found[0] == pytest.approx(others[0], rel=1e-6), "flat parameters are other ones, so sums round differently"


def freeze_later() -> tuple[str | None, bool]:
    """A matrix is frozen after a step, and trained again: it does not move meanwhile, nor does its momentum."""
    traces, moved = [], True
    for stage in (0, 3):
        engine = start(wide(), config(stage, optimizer=muon()))
        train(engine, 1)
        engine.module.blocks[1].up.weight.requires_grad = False
        before = weights_of(engine.module)["blocks.1.up.weight"]
        train(engine, 2)
        moved = not torch.equal(before, weights_of(engine.module)["blocks.1.up.weight"])
        engine.module.blocks[1].up.weight.requires_grad = True
        traces.append(train(engine, 2))
        engine.destroy()
    return first_difference(traces[1], traces[0]), moved


def write_frozen() -> bool:
    """What is written to a frozen matrix stays, in 16 bits too."""
    engine = start(wide(), config(1, optimizer=muon(), **precision("bf16")))
    train(engine, 1)
    weight = engine.module.blocks[1].up.weight
    weight.requires_grad = False
    weight.data.fill_(0.125)
    train(engine, 2)
    return bool((weights_of(engine.module)["blocks.1.up.weight"] == 0.125).all())


def test_what_is_written_to_a_frozen_matrix_stays(on_ranks):
    assert on_ranks(2, write_frozen) == [True, True]


def test_a_matrix_may_be_frozen_for_a_while(on_ranks):
    for told, moved in on_ranks(2, freeze_later):
        assert told is None
        assert not moved


# -- below the device ------------------------------------------------------------------------------------------------


def run_tiers(dtype: str, folder: str, accumulation: int) -> tuple[dict[str, Trace], dict[str, tuple[Any, Any]]]:
    """States and parameters in each tier, and what crosses between tiers beside what is planned."""
    traces, crossings = {}, {}
    for name, zero in tiers_of(folder).items():
        extra = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.3, **precision(dtype)}
        engine = start(wide(), config(2, optimizer=muon(), zero_optimization=zero, **extra))
        traces[name] = train(engine, 3 * accumulation)
        before = engine.ledger.copy()
        train(engine, accumulation)
        engine.module  # noqa: B018
        engine.optimizer.sharded.wait_for_host()
        since = engine.ledger.since(before)
        moved = {row.operation: row.bytes for row in since.rows() if row.operation in ("down", "up", "read", "written")}
        planned = engine.model_memory.planned_offload_traffic()
        crossings[name] = (moved.get("down", 0), planned.down)
        engine.destroy()
    return traces, crossings


@pytest.mark.parametrize("world", [more(1), 2, more(3)])
@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), more("bf16", 1), more("bf16", 2)])
def test_every_tier_is_bit_equal(on_ranks, tmp_path, world, dtype, accumulation):
    for traces, crossings in on_ranks(world, run_tiers, dtype, str(tmp_path), accumulation):
        for name, trace in traces.items():
            assert first_difference(trace, traces["device"]) is None, name
        for name, (moved, planned) in crossings.items():
            assert moved == planned, name


def chunks_on_disk(folder: str) -> str | None:
    """Parameters on a disk are cast over what has been read by then, chunk by chunk."""
    traces, usual = [], offloaded_step.CHUNK
    offloaded_step.CHUNK = 2048
    disk = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    for zero in ({}, {"offload_optimizer": disk, "offload_param": disk}):
        extra = {"gradient_accumulation_steps": 2, "zero_optimization": zero, **precision("bf16")}
        engine = start(wide(), config(3, optimizer=muon(), **extra))
        traces.append(train(engine, 6))
        engine.destroy()
    offloaded_step.CHUNK = usual
    return first_difference(*traces)


def test_chunks_do_not_write_over_what_is_still_to_be_read(on_ranks, tmp_path):
    assert on_ranks(1, chunks_on_disk, str(tmp_path)) == [None]


def delay() -> str:
    zero = {"offload_optimizer": {"device": "cpu"}}
    try:
        start(wide(), config(2, optimizer=muon(), zero_optimization=zero, onefold={"delayed_host_step": True}))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_delayed_step_of_the_host_is_refused(on_ranks):
    assert all("computes whole matrices on the device" in told for told in on_ranks(1, delay))


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_of(stage: int) -> tuple[int, int, int, Any, Any]:
    engine = start(wide(), config(stage, optimizer=muon()))
    for x, y in batches(1):
        engine.backward(engine(x, y))
    before = engine.ledger.copy()
    engine.step()
    engine.module  # noqa: B018 - reading it waits for what is in flight
    sent = sum(row.bytes for row in engine.ledger.since(before).rows() if row.operation == "matrices")
    planned, num = 0, 0
    for store, found in engine.state.step.matrices.matrices.items():
        matrices, owners = [m for m, _ in found], [owner for _, owner in found]
        planned += count_sent(store.spec.layout, matrices, owners, rank())
        num += sum(m.rows * m.columns for m in matrices)
    return sent, planned, num, engine.model_memory.held_bytes(), engine.model_memory.planned_bytes()


@covering(stage=(0, 1, 3), world=(2, 3, more(1)), strength=1)
def test_what_travels_is_what_the_layout_says(on_ranks, world, stage):
    results = on_ranks(world, bytes_of, stage)
    for sent, planned, num, held, expected in results:
        assert sent == (planned if stage else 0)
        assert sent <= 2 * 2 * num
        assert (held.masters, held.states) == (expected.masters, expected.states)
    total = sum(sent for sent, *_ in results)
    assert total <= 4 * results[0][2], "every piece goes to its owner and back at most"
    assert (total > 0) == (world > 1 and stage > 0)


def test_states_are_four_bytes_a_parameter_of_a_matrix(on_ranks):
    for names, num_bytes in on_ranks(1, count_states):
        assert names == {("momentum_buffer",): {"up.weight", "down.weight"}, ADAMS: OTHERS}
        assert num_bytes == {("momentum_buffer",): 4, ADAMS: 8}


ADAMS = ("exp_avg", "exp_avg_sq")
OTHERS = {"weight", "norm.weight", "norm.bias", "up.bias"}


def count_states() -> tuple[dict[tuple[str, ...], set[str]], dict[tuple[str, ...], float]]:
    """Whose states there are, and how many bytes an element of a flat parameter takes."""
    engine = start(wide(), config(2, optimizer=muon()))
    names: dict[tuple[str, ...], set[str]] = {}
    num_bytes: dict[tuple[str, ...], float] = {}
    for store in engine.state.step.stores:
        kept, layout = tuple(store.states), store.spec.layout
        names.setdefault(kept, set()).update(member.name.split(".", 2)[-1] for member in layout.members)
        num_bytes[kept] = sum(state.nbytes for state in store.states.values()) / layout.total
    return names, num_bytes


# -- checkpoints -------------------------------------------------------------------------------------------------------


def momentum_of(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: safe_get_full_optimizer_state(parameter, "momentum_buffer").clone()
        for name, parameter in engine.module.named_parameters()
        if name.endswith(("up.weight", "down.weight"))
    }


def save(folder: str, stage: int) -> dict[str, torch.Tensor]:
    engine = start(wide(), config(stage, optimizer=muon()))
    train(engine, 2)
    engine.save_checkpoint(folder)
    return momentum_of(engine)


def load(folder: str, stage: int) -> tuple[dict[str, torch.Tensor], Trace]:
    engine = start(wide(seed=9), config(stage, optimizer=muon()))
    engine.load_checkpoint(folder)
    return momentum_of(engine), train(engine, 2, seed=1)


@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (3, 2)), more((3, 2), (1, 3))])
def test_a_checkpoint_goes_to_other_stages_and_ranks(on_ranks, tmp_path, saved, loaded):
    (stage, world), (other, ranks) = saved, loaded
    written = on_ranks(world, save, str(tmp_path), stage)[0]
    found = on_ranks(ranks, load, str(tmp_path), other)
    assert first_difference(found[0][0], written) is None
    again = on_ranks(ranks, load, str(tmp_path), 0)
    assert first_difference(found[0][1], again[0][1]) is None


# -- matrices and their owners -----------------------------------------------------------------------------------------


def test_three_dimensions_are_experts_and_four_are_one_matrix():
    layout = Layout.of([("experts", (3, 4, 5), 0), ("kernel", (6, 2, 3, 3), 0), ("plain", (7, 8), 0)], 2)
    found = matrices_of(layout)
    assert [matrix.shape for matrix in found] == [(4, 5)] * 3 + [(6, 18), (7, 8)]
    assert [matrix.start for matrix in found] == [0, 20, 40, 256, 512]


def test_rows_are_split_as_asked():
    layout = Layout.of([("a.qkv", (12, 5), 0), ("b.kv", (6, 5), 0)], 1)
    shapes = [matrix.shape for matrix in matrices_of(layout, {"*.qkv": 3, "b.*": [4, 2]})]
    assert shapes == [(4, 5)] * 3 + [(4, 5), (2, 5)]
    with pytest.raises(MatrixError, match=r"a.qkv has 12 rows, which cannot be divided into 5 equal parts"):
        matrices_of(layout, {"*.qkv": 5})
    with pytest.raises(MatrixError, match=r"b.kv has 6 rows, which cannot be divided into parts of \[4, 1\] rows"):
        matrices_of(layout, {"b.*": [4, 1]})


def test_a_vector_is_no_matrix():
    with pytest.raises(MatrixError, match="bias has 1 dimension and is not a matrix"):
        matrices_of(Layout.of([("bias", (5,), 0)], 1))


shapes = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=8)


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5))
def test_every_matrix_has_one_owner_that_holds_a_piece_of_it(units, ranks):
    layouts = [Layout.of([(str(i), shape, 0) for i, shape in enumerate(unit)], ranks) for unit in units]
    found = [(layout, matrices_of(layout)) for layout in layouts]
    owners = choose_owners(found, lambda rows, columns: rows * columns)
    sent = 0
    for (layout, matrices), own in zip(found, owners, strict=True):
        for matrix, owner in zip(matrices, own, strict=True):
            assert owner in holders(layout, matrix)
            pieces = [matrix.piece(*layout.shard_range(place)) for place in range(ranks)]
            assert sum(high - low for low, high in pieces) == matrix.rows * matrix.columns
            assert [place for place, (low, high) in enumerate(pieces) if low < high] == list(holders(layout, matrix))
            low, high = pieces[owner]
            sent += 2 * 2 * (matrix.rows * matrix.columns - (high - low))
        ours = sum(count_sent(layout, matrices, own, place) for place in range(ranks))
        sent -= ours
    assert sent == 0


def test_owners_share_the_work():
    layout = Layout.of([(str(i), (64, 512), 0) for i in range(8)], 4)
    both = [(layout, matrices_of(layout))] * 4
    owners = choose_owners(both, lambda rows, columns: 1.0)
    load = [sum(own.count(place) for own in owners) for place in range(4)]
    assert max(load) - min(load) <= 1


def test_what_has_no_choice_is_counted_first():
    """Two units whose second matrix may go to either rank, while one rank has more to do by itself."""
    layout = Layout.of([("a", (6, 1024), 0), ("b", (8, 1024), 0), ("c", (2, 1024), 0)], 2)
    units = [(layout, matrices_of(layout))] * 2
    assert [list(holders(layout, matrix)) for matrix in units[0][1]] == [[0], [0, 1], [1]]
    assert choose_owners(units[:1], lambda rows, columns: rows) == [[0, 1, 1]]
    assert choose_owners(units, lambda rows, columns: rows) == [[0, 1, 1], [0, 0, 1]]


def test_the_dearest_comes_first():
    """Of a matrix on both ranks and one on the second alone, the first goes where the other is not."""
    layout = Layout.of([("a", (3, 2048), 0), ("b", (1, 2048), 0)], 2)
    (owners,) = choose_owners([(layout, matrices_of(layout))], lambda rows, columns: rows * columns)
    assert owners == [0, 1]


# -- the iteration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (64, 64), (1, 7)])
@pytest.mark.parametrize(("coefficients", "limit", "near"), [([QUINTIC] * 5, 1.0, 0.35), (POLAR_EXPRESS, 1.02, 0.15)])
def test_singular_values_come_near_one(shape, coefficients, limit, near):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrix.clone(), coefficients, limit, 1e-7))
    assert values.max() < 1 + near
    # The smallest of a square matrix may be any.
    assert values.sort().values[len(values) // 10 :].min() > 1 - near


# -- who is taken ------------------------------------------------------------------------------------------------------


def section(kind: str = "Muon", **params: Any) -> OptimizerSpec | None:
    return make_optimizer_spec(load_config({"optimizer": {"type": kind, "params": params}}))


def taken(model: nn.Module, groups: Any = None, **params: Any) -> dict[bool, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    chosen = choose(None, section(**params), groups or list(model.parameters()), model)
    found: dict[bool, list[str]] = {True: [], False: []}
    for group in chosen.groups:
        found[group["use_muon"]] += [names[id(p)] for p in group["params"]]
    return found


def test_hidden_matrices_are_taken_and_nothing_else():
    model = Net(depth=1)
    assert taken(model) == {
        True: ["blocks.0.up.weight", "blocks.0.down.weight"],
        False: ["embed.weight", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.up.bias", "head.weight"],
    }
    assert taken(model, adamw_names=["*.down.weight"])[True] == ["blocks.0.up.weight"]
    model.blocks[0].up.weight.use_muon = False
    assert taken(model)[True] == ["blocks.0.down.weight"]
    groups = [{"params": [model.head.weight], "use_muon": True}, {"params": [model.blocks[0].up.bias]}]
    assert taken(model, groups) == {True: ["head.weight"], False: ["blocks.0.up.bias"]}


def test_rates_and_constants_of_both_kinds():
    model = Net(depth=1)
    chosen = choose(None, section(lr=3e-3, muon_lr=0.02, eps=1e-6), list(model.parameters()), model)
    matrices, others = chosen.groups
    assert (matrices["lr"], others["lr"]) == (0.02, 3e-3)
    assert (matrices["eps"], others["eps"]) == (1e-7, 1e-6)
    assert not {"muon_lr", "adam_lr", "adamw_names", "split_rows"} & (matrices.keys() | others.keys())


@pytest.mark.parametrize(("params", "rates"), [
    ({}, (0.02, 3e-4)),
    ({"lr": 1e-3}, (1e-3, 1e-3)),
    ({"lr": 1e-3, "adam_lr": 1e-4}, (1e-3, 1e-4)),
    ({"muon_lr": 0.1}, (0.1, 3e-4)),
    ({"lr": None, "muon_lr": None}, (0.02, 3e-4)),
])  # fmt: skip
def test_what_is_left_out_is_deepspeeds(params, rates):
    model = Net(depth=1)
    matrices, others = choose(None, section(**params), list(model.parameters()), model).groups
    assert (matrices["lr"], others["lr"]) == rates
    assert (matrices["momentum"], others["betas"], others["eps"]) == (0.95, (0.9, 0.95), 1e-10)
    grouped = [{"params": [model.head.weight], "use_muon": True, "lr": 0.5}]
    assert choose(None, section(**params), grouped, model).groups[0]["lr"] == 0.5


def test_shampoo_has_one_rate_unless_two_are_given():
    model = Net(depth=1)
    for params, rates in (({}, (1e-3, 1e-3)), ({"lr": 0.1}, (0.1, 0.1)), ({"adam_lr": 1e-4}, (1e-3, 1e-4))):
        matrices, others = choose(None, section("Shampoo", **params), list(model.parameters()), model).groups
        assert (matrices["lr"], others["lr"]) == rates


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"adamw_names": ["blocks.9*"]}, r"adamw_names: 'blocks.9\*' matches no parameter"),
        ({"split_rows": ["*.up.weight"]}, "is not a pattern with parts"),
        ({"split_rows": ["*.up.weight=0"]}, "is not a pattern with parts"),
        ({"split_rows": ["*.qkv.weight=3"]}, r"split_rows: '\*.qkv.weight' matches no parameter"),
    ],
)
def test_names_that_fit_nothing_are_told(params, told):
    with pytest.raises(ConfigError, match=told):
        taken(Net(depth=1), **params)


def test_a_part_of_a_name_is_no_head():
    model = nn.ModuleDict({"multihead": nn.Linear(4, 4, bias=False), "head": nn.Linear(4, 4, bias=False)})
    assert taken(model) == {True: ["multihead.weight"], False: ["head.weight"]}


def step_one_of_two() -> list[str]:
    """Neither of the optimizers that were handed in may be stepped past the engine, and both hooks run."""
    model, seen = wide(), []
    matrices = [p for name, p in model.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    ids = {id(p) for p in matrices}
    pair = [torch.optim.Muon(matrices), torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids])]
    engine = start(model, config(2, optimizer=None), optimizer=pair)
    for optimizer in pair:
        optimizer.register_step_pre_hook(lambda of, *_: seen.append(type(of).__name__))
        with pytest.raises(RuntimeError, match=r"Call engine.step\(\) instead"):
            optimizer.step()
    train(engine, 1)
    return seen


def test_both_of_two_optimizers_answer_as_the_engines(on_ranks):
    assert on_ranks(2, step_one_of_two) == [["Muon", "AdamW"]] * 2


def test_two_optimizers_that_do_not_go_together_are_told():
    model = Net(depth=1)
    pair = [torch.optim.RMSprop([model.head.weight]), torch.optim.AdamW([model.embed.weight])]
    with pytest.raises(ConfigError, match=r"a list \(RMSprop, AdamW\) cannot contain RMSprop"):
        choose(pair, None, [])
    with pytest.raises(ConfigError, match="cannot be empty"):
        choose([], None, [])
    with pytest.raises(TypeError, match="a list must contain torch optimizers, not type"):
        choose([torch.optim.AdamW], None, [])


# -- several optimizers for one model ----------------------------------------------------------------------------------


class SignedRows(onefold.MatrixRule):
    """Of each row the sign of its mean: nonsense, but no part of a row can know it."""

    name = "rows"

    def names_of_matrices(self, hyper):
        return ["momentum_buffer"]

    def prepare(self, gradient, states, update, hyper, step):
        update.copy_(states["momentum_buffer"].lerp_(gradient, 0.1))

    def work(self, matrix, kept, hyper, step):
        kept["count"] = kept.get("count", torch.zeros(1)) + 1
        return matrix.mean(1, keepdim=True).sign().expand_as(matrix)

    def finish(self, parameter, update, shape, hyper):
        parameter.add_(update, alpha=-hyper["lr"])

    def cost(self, rows, columns):
        return rows * columns


class RowOptimizer(torch.optim.Optimizer):
    onefold_rule = SignedRows()

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure=None):
        raise AssertionError("a rule steps in its place")


class Negated(onefold.MatrixRule):
    """Along the sign of each element; kept: how often."""

    name = "signs"

    def names_of_matrices(self, hyper):
        return ["momentum_buffer"]

    def prepare(self, gradient, states, update, hyper, step):
        update.copy_(states["momentum_buffer"].lerp_(gradient, 0.5))

    def work(self, matrix, kept, hyper, step):
        kept["calls"] = kept.get("calls", 0) + 1
        kept["scale"], kept["odd"] = 1 / kept["calls"], kept["calls"] % 2 == 1
        return matrix.sign().float()

    def finish(self, parameter, update, shape, hyper):
        parameter.add_(update, alpha=-hyper["lr"])

    def cost(self, rows, columns):
        return 1e9 * rows


class SignOptimizer(torch.optim.Optimizer):
    onefold_rule = Negated()

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})


class OwnShampoo(torch.optim.Optimizer):
    onefold_rule = "shampoo"

    def __init__(self, params, **given):
        super().__init__(params, {"lr": 0.02, **given})


MIXES = {
    "two Muons": lambda up, down, rest: [
        torch.optim.Muon(up, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=1e-3, fused=True),
        torch.optim.Muon(down, lr=0.05, momentum=0.8, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
    ],
    "elementwise ones first": lambda up, down, rest: [
        torch.optim.SGD(rest[:1], lr=0.1, momentum=0.9, dampening=0.2, fused=True),
        torch.optim.Adagrad(rest[1:2], lr=0.01),
        torch.optim.Muon([*up, *down], lr=0.02),
        torch.optim.AdamW(rest[2:], lr=1e-3, fused=True),
    ],
    "elementwise ones alone": lambda up, down, rest: [
        torch.optim.SGD([*up, *down], lr=0.1, fused=True),
        torch.optim.Adam(rest, lr=1e-3, weight_decay=0.1, fused=True),
    ],
    "Shampoo and Muon": lambda up, down, rest: [
        OwnShampoo(up, root_every=2),
        torch.optim.Muon(down, lr=0.02),
        torch.optim.AdamW(rest, lr=1e-3),
    ],
    "Muon first and rules of one's own": lambda up, down, rest: [
        torch.optim.Muon(up[:1], lr=0.02),
        SignOptimizer([{"params": up[1:]}, {"params": rest[:1], "use_signs": False}]),
        RowOptimizer(down),
        torch.optim.AdamW(rest[1:], lr=1e-3),
    ],
}  # fmt: skip


def mix(kind: str, of: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(of.named_parameters())
    up, down = ([p for name, p in named.items() if name.endswith(end)] for end in ("up.weight", "down.weight"))
    taken = {id(p) for p in (*up, *down)}
    return MIXES[kind](up, down, [p for p in named.values() if id(p) not in taken])


def mix_beside_torch(kind: str, stage: int) -> str | None:
    torch.manual_seed(3)
    model, plain = Net(width=WIDTH), Net(width=WIDTH)
    plain.load_state_dict(model.state_dict())
    engine, optimizers = start(model, config(stage, optimizer=None), optimizer=mix(kind, model)), mix(kind, plain)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randint(0, 31, (4, 7), generator=generator)
        engine.backward(engine(x, x))
        engine.step()
        plain(x, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return first_difference(weights_of(engine.module), weights_of(plain))


@pytest.mark.parametrize("stage", [more(0), 2, more(3)])
@pytest.mark.parametrize("kind", ["two Muons", "elementwise ones first", "elementwise ones alone"])
def test_several_optimizers_step_as_they_do_in_plain_torch(on_ranks, kind, stage):
    assert on_ranks(1, mix_beside_torch, kind, stage) == [None]


def run_mix(kind: str, folder: str) -> tuple[list[Trace], list[tuple[Any, Any]], str | None]:
    """All stages and tiers; what is held beside what is planned; and a run that goes on from a checkpoint."""
    places = [{"stage": stage} for stage in range(4)] + [tiers_of(folder)["host"], tiers_of(folder)["disk"]]
    traces, held = [], []
    for place, zero in enumerate(places):
        model = wide()
        given = {"zero_optimization": zero, "gradient_clipping": 0.3}
        engine = start(model, config(2, optimizer=None, **given), optimizer=mix(kind, model))
        train(engine, 2)
        if place == 2:
            engine.save_checkpoint(f"{folder}/saved")
        traces.append(train(engine, 2, seed=1))
        found, planned = engine.model_memory.held_bytes(), engine.model_memory.planned_bytes()
        held.append(((found.masters, found.states), (planned.masters, planned.states)))
        assert engine.describe()
        engine.destroy()
    model = wide(seed=9)
    engine = start(model, config(3, optimizer=None, gradient_clipping=0.3), optimizer=mix(kind, model))
    engine.load_checkpoint(f"{folder}/saved")
    told = first_difference(train(engine, 2, seed=1), traces[0])
    return traces, held, told


@pytest.mark.parametrize("world", [2, more(3), more(1)])
@pytest.mark.parametrize("kind", [
    more("two Muons"), more("elementwise ones first"), more("elementwise ones alone"), more("Shampoo and Muon"),
    "Muon first and rules of one's own",
])  # fmt: skip
def test_several_optimizers_are_bit_equal_in_all_stages_and_tiers(on_ranks, tmp_path, kind, world):
    for traces, held, told in on_ranks(world, run_mix, kind, str(tmp_path)):
        assert [first_difference(trace, traces[0]) for trace in traces] == [None] * 6
        assert told is None, "after a checkpoint"
        for found, planned in held:
            assert found == planned


def steps_of_each() -> dict[str, float]:
    model, sizes = wide(), {}
    before = None
    engine = start(model, config(2, optimizer=None), optimizer=mix("Muon first and rules of one's own", model))
    before = weights_of(model)
    train(engine, 1)
    for name, weight in weights_of(model).items():
        sizes[name] = (weight - before[name]).abs().max().item()
    return sizes


def test_every_optimizer_of_a_list_steps_its_own_matrices(on_ranks):
    for sizes in on_ranks(2, steps_of_each):
        assert sizes["blocks.1.up.weight"] == pytest.approx(1e-3, rel=1e-2), "by their signs"
        assert sizes["blocks.1.down.weight"] == pytest.approx(1e-3, rel=1e-2), "by the signs of rows"
        assert sizes["blocks.0.up.weight"] != pytest.approx(1e-3, rel=1e-2), "orthogonalised"


# -- what a rule returns and keeps -------------------------------------------------------------------------------------


class Wrong(Negated):
    name = "wrong"

    def __init__(self, work: Any) -> None:
        self._work = work

    def work(self, matrix, kept, hyper, step):
        return self._work(matrix, kept)


WRONG_WORK = {
    "transposed": (
        lambda matrix, kept: matrix.T,
        r"parameter weight: work\(\) returned shape \(24, 72\) for .* \(72, 24\)",
    ),
    "flat": (lambda matrix, kept: matrix.flatten(), r"returned shape \(1728,\) for a matrix of shape \(72, 24\)"),
    "nothing": (lambda matrix, kept: None, r"parameter weight: work\(\) returned NoneType"),
    "complex": (lambda matrix, kept: matrix.to(torch.complex64), r"returned a tensor of torch.complex64"),
    "meta": (lambda matrix, kept: matrix.to("meta"), "on meta"),
    "text": (lambda matrix, kept: kept.update(a="b") or matrix, r"put str under 'a' into kept"),
    "list": (lambda matrix, kept: kept.update(a=[1]) or matrix, r"put list under 'a' into kept"),
    "number as name": (lambda matrix, kept: kept.update({1: 2}) or matrix, r"put int under 1 into kept"),
}


def run_wrong(kind: str) -> str:
    class Mine(torch.optim.Optimizer):
        onefold_rule = Wrong(lambda matrix, kept: matrix)

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

    model = nn.Linear(24, 72, bias=False)
    engine = start(model, config(2, optimizer=None), optimizer=Mine(model.parameters()))
    Mine.onefold_rule._work = WRONG_WORK[kind][0]  # only once it is built: it is tried there on another matrix
    engine.backward(engine(torch.ones(2, 24)).square().mean())
    try:
        engine.step()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", WRONG_WORK)
def test_what_a_rule_may_not_return_or_keep_is_named(on_ranks, kind):
    (told,) = on_ranks(1, run_wrong, kind)
    assert "MatrixRule 'wrong' (Wrong)" in told
    assert re.search(WRONG_WORK[kind][1], told), told


def kept_numbers(folder: str, ranks: int) -> list[Any]:
    found = []
    for saves in (True, False) if ranks == 2 else (False,):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        engine = start(model, config(2, optimizer=None), optimizer=SignOptimizer(model.parameters()))
        if not saves:
            engine.load_checkpoint(folder)
        for _ in range(2 + (not saves)):
            engine.backward(engine(torch.ones(2, 64)).square().mean())
            engine.step()
        if saves:
            engine.save_checkpoint(folder)
        found += list(engine.state.step.matrices._kept.values())
        engine.destroy()
    return found


def test_numbers_that_are_kept_of_matrices_go_to_other_owners(on_ranks, tmp_path):
    """The first runs of two ranks save, the others go on from there."""
    once = {"calls": 2, "scale": 1 / 2, "odd": False}
    twice = {"calls": 5, "scale": 1 / 5, "odd": True}
    first, second = on_ranks(2, kept_numbers, str(tmp_path), 2)
    assert [(first + second).count(each) for each in (once, twice)] == [3, 3]
    assert first
    assert second
    for found in on_ranks(1, kept_numbers, str(tmp_path), 1):
        assert found == [twice] * 3


def load_split(folder: str, saved: list[str], split: list[str], strict: bool) -> tuple[str, str]:
    """What a load, and the step after it, raise."""
    told = []
    for step, parts in enumerate((saved, split)):
        optimizer = {"type": "Shampoo", "params": {"lr": 0.02, "split_rows": parts}}
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 72, bias=False), nn.Linear(72, 24, bias=False))
        engine = start(model, config(2, optimizer=optimizer))
        if step == 1:
            try:
                engine.load_checkpoint(folder, load_module_strict=strict)
            except ValueError as error:
                told.append(str(error))
        engine.backward(engine(torch.ones(2, 24)).square().mean())
        engine.step()
        if step == 0:
            engine.save_checkpoint(folder)
        engine.destroy()
    return "".join(told), ""


@pytest.mark.parametrize(("saved", "split", "rows"), [
    ([], ["0.weight=3"], r"\[72\] rows, but this job has matrices of \[24, 24, 24\] rows"),
    more(["0.weight=3"], [], r"\[24, 24, 24\] rows, but this job has matrices of \[72\] rows"),
    more(["0.weight=3"], ["0.weight=24,48"], r"\[24, 24, 24\] rows, .* of \[24, 48\] rows"),
])  # fmt: skip
def test_what_is_kept_of_other_matrices_is_refused(on_ranks, tmp_path, saved, split, rows):
    for told, _ in on_ranks(2, load_split, str(tmp_path), saved, split, True):
        assert re.search(rf"columns, columns_root, rows, rows_root of 0\.weight: saved for matrices of {rows}", told), (
            told
        )
    assert [told for told, _ in on_ranks(2, load_split, str(tmp_path), saved, split, False)] == ["", ""], "started anew"


# -- keys of groups ----------------------------------------------------------------------------------------------------


def divided(more_given: dict[str, Any], params: dict[str, Any], kind: str = "Muon") -> list[dict[str, Any]]:
    model = Net(depth=1)
    matrices = [model.blocks[0].up.weight, model.blocks[0].down.weight]
    chosen = choose(None, section(kind, **params), [{"params": matrices, **more_given}], model)
    names = {id(p): name.removeprefix("blocks.0.") for name, p in model.named_parameters()}
    return [{**g, "params": [names[id(p)] for p in g["params"]], "splits": chosen.splits} for g in chosen.groups]


@pytest.mark.parametrize(("given", "params", "rates"), [
    ({"muon_lr": 0.005}, {}, [0.005]),
    ({"muon_lr": 0.005, "lr": 0.1}, {"muon_lr": 0.3}, [0.005]),
    ({"muon_lr": 0.0}, {"lr": 0.1}, [0.0]),
    ({"lr": 0.0}, {"muon_lr": 0.3}, [0.0]),
    ({}, {"muon_lr": 0.0, "lr": 0.1}, [0.0]),
    ({"lr": 0.1}, {"muon_lr": 0.3}, [0.1]),
    ({"use_muon": False, "adam_lr": 7e-4}, {"adam_lr": 1.0}, [7e-4]),
    ({"use_muon": False, "adam_lr": 0.0}, {"lr": 0.1}, [0.0]),
    ({"use_muon": False}, {"adam_lr": 0.0}, [0.0]),
    ({"adamw_names": ["*.up.*"], "adam_lr": 1e-5, "muon_lr": "2e-2"}, {}, [0.02, 1e-5]),
    ({"use_muon": True, "adamw_names": ["*.up.*"], "lr": 0.5}, {}, [0.5, 0.5]),
])  # fmt: skip
def test_rates_of_a_group_come_first(given, params, rates):
    assert [group["lr"] for group in divided(given, params)] == rates


def test_names_and_splits_of_a_group_are_its_own():
    matrices, others = divided({"use_muon": True, "adamw_names": ["*.up.weight"], "momentum": 0.5}, {})
    assert (matrices["params"], matrices["use_muon"], matrices["momentum"]) == (["down.weight"], True, 0.5)
    assert (others["params"], others["use_muon"]) == (["up.weight"], False)
    (group,) = divided({"split_rows": ["*.up.weight=2"], "ns_steps": 3}, {"split_rows": ["*=4"]})
    assert group["splits"] == {"blocks.0.up.weight": 2, "*": 4}
    assert group["ns_steps"] == 3
    (group,) = divided({"use_muon": False, "amsgrad": True, "betas": [0.5, 0.6]}, {})
    assert (group["amsgrad"], group["betas"]) == (True, (0.5, 0.6))


@pytest.mark.parametrize(("given", "kind", "told"), [
    ({"muon_lr": -1}, "Muon", r"model_parameters\[0\].muon_lr = -1: expected at least 0"),
    ({"use_muon": True, "adam_lr": 0.1}, "Muon", r"adam_lr: it has no effect in a group with use_muon = True"),
    ({"use_muon": False, "muon_lr": 0.1}, "Muon", r"muon_lr: it has no effect in a group with use_muon = False"),
    ({"use_muon": False, "split_rows": ["*=2"]}, "Muon", "split_rows: it has no effect"),
    ({"adamw_names": ["*"], "split_rows": ["*=2"]}, "Muon", "split_rows: no parameter of the group is updated as a"),
    ({"adamw_names": ["head*"]}, "Muon", r"model_parameters\[0\].adamw_names: 'head\*' matches no parameter"),
    ({"split_rows": ["head*=2"]}, "Muon", r"model_parameters\[0\].split_rows: 'head\*' matches no parameter"),
    ({"split_rows": "*=2"}, "Muon", "split_rows = .*expected a list of strings"),
    ({"amsgrad": True}, "Muon", "amsgrad: optimizer Muon does not use it"),
    ({"covariance_eps": 0.1}, "Muon", "covariance_eps: optimizer Muon does not use it"),
    ({"muon_lr": 0.1}, "Shampoo", "muon_lr: optimizer Shampoo does not use it"),
    ({"muon_lr": 0.1}, "AdamW", "muon_lr: optimizer adamw does not use it"),
    ({"momentum": 0.1}, "NAdam", "momentum: optimizer NAdam does not use it"),
])  # fmt: skip
def test_keys_that_a_group_cannot_have_are_named(given, kind, told):
    with pytest.raises(ConfigError, match=told):
        divided(given, {}, kind)


def test_keys_of_the_config_are_not_read_in_groups_of_torchs_muon():
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"param_groups\[0\].muon_lr: torch.optim.Muon does not use it"):
        choose(torch.optim.Muon([{"params": [weight], "muon_lr": 0.1}]), None, [])


def split_trains() -> list[Trace]:
    return [train(start(wide(), config(stage, optimizer=muon(split_rows=["*.up.weight=4"]))), 2) for stage in (0, 2, 3)]


@pytest.mark.slow
def test_split_rows_change_the_update_alike_in_all_stages(on_ranks):
    whole = on_ranks(2, run_stages, "fp32", 1, {})[0][0]
    for split, *others in on_ranks(2, split_trains):
        assert all(first_difference(other, split) is None for other in others)
        assert not torch.equal(split.weights["blocks.0.up.weight"], whole.weights["blocks.0.up.weight"])


def test_the_matrix_of_a_piece_is_found():
    matrix = Matrix(0, 100, 10, 20)
    assert matrix.stop == 300
    assert matrix.piece(0, 150) == (100, 150)
    assert matrix.piece(250, 400) == (250, 300)
    assert math.prod(matrix.shape) == 200
    low, high = matrix.piece(400, 500)
    assert low == high


# -- others on the same mechanism --------------------------------------------------------------------------------------

SHAMPOO = {"type": "Shampoo", "params": {"lr": 0.02, "adam_lr": 1e-3, "root_every": 2}}


def run_others(kind: str) -> list[Trace]:
    traces = []
    for stage in range(4):
        model = wide()
        given: dict[str, Any] = {"optimizer": SHAMPOO}
        more_given = {}
        if kind == "own":
            given = {"optimizer": None}
            matrices = [p for name, p in model.named_parameters() if name.endswith(("up.weight", "down.weight"))]
            for name, parameter in model.named_parameters():
                parameter.requires_grad = name.endswith(("up.weight", "down.weight"))
            more_given = {"optimizer": RowOptimizer(matrices)}
        engine = start(model, config(stage, gradient_clipping=0.3, **given), **more_given)
        traces.append(train(engine, 4))
        engine.destroy()
    return traces


@pytest.mark.parametrize("kind", ["shampoo", more("own")])
@pytest.mark.parametrize("world", [more(1), 2, more(3)])
def test_other_rules_are_bit_equal_in_all_stages_too(on_ranks, world, kind):
    for traces in on_ranks(world, run_others, kind):
        assert [first_difference(trace, traces[0]) for trace in traces] == [None] * 4
        before, after = wide_weights(), traces[0].weights["blocks.0.up.weight"]
        assert not torch.equal(before, after)


def wide_weights() -> torch.Tensor:
    torch.manual_seed(5)
    return Net(width=WIDTH).blocks[0].up.weight.detach()


def bytes_kept() -> list[tuple[int, int, bool]]:
    found = []
    for stage in (0, 2):
        engine = start(wide(), config(stage, optimizer=SHAMPOO))
        train(engine, 1)
        matrices = engine.state.step.matrices
        planned, held = matrices.planned_kept(), matrices.held_kept()
        found.append((planned, held, engine.model_memory.planned_buffers().matrices > planned))
        engine.destroy()
    return found


def test_what_is_kept_of_matrices_is_planned(on_ranks):
    """Every rank keeps all of it in stage 0; in stage 2 each matrix has one owner."""
    results = on_ranks(2, bytes_kept)
    for (everything, held, counted), (_, its_own, _) in results:
        assert everything == held > its_own > 0
        assert counted
    assert all(planned == held for each in results for planned, held, _ in each)
    assert sum(each[1][1] for each in results) == results[0][0][1]


def save_others(folder: str, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    engine = start(wide(), config(stage, optimizer=SHAMPOO))
    train(engine, 3)
    engine.save_checkpoint(folder)
    return kept_of(engine)


def load_others(folder: str, stage: int) -> tuple[dict[str, dict[str, torch.Tensor]], Trace]:
    engine = start(wide(seed=9), config(stage, optimizer=SHAMPOO))
    engine.load_checkpoint(folder)
    return kept_of(engine), train(engine, 3, seed=1)


def kept_of(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """What this rank keeps of whole matrices, by parameter."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for (store, matrix), kept in engine.state.step.matrices._kept.items():
        found[store.spec.layout.members[matrix.member].name] = {name: value.clone() for name, value in kept.items()}
    return found


@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (3, 2)), more((3, 2), (1, 3)), more((0, 2), (2, 3))])
def test_what_is_kept_of_matrices_goes_to_other_owners(on_ranks, tmp_path, saved, loaded):
    (stage, world), (other, ranks) = saved, loaded
    written: dict[str, Any] = {}
    for each in on_ranks(world, save_others, str(tmp_path), stage):
        assert stage == 0 or not written.keys() & each.keys(), "a matrix has one owner"
        written |= each
    assert len(written) == 6
    found: dict[str, Any] = {}
    results = on_ranks(ranks, load_others, str(tmp_path), other)
    for each, _ in results:
        found |= each
    assert first_difference(found, written) is None
    again = on_ranks(ranks, load_others, str(tmp_path), 0)
    assert first_difference(results[0][1], again[0][1]) is None


def test_an_unknown_optimizer_is_told_how_to_be_known():
    class Mine(torch.optim.Optimizer):
        def step(self, closure=None):
            pass

    chosen = choose(Mine([nn.Parameter(torch.ones(3))], {}), None, [])
    with pytest.raises(ConfigError, match=r"needs whole matrices, define a rule for its class .* docs/optimizers.md"):
        check_shardable(chosen, allow_untested=False)


def log_of_buffers() -> tuple[str, int]:
    engine = start(wide(), config(2, optimizer=muon()))
    return engine.describe(), engine.model_memory.planned_buffers().matrices


def test_what_matrices_take_in_a_step_is_planned(on_ranks):
    for text, planned in on_ranks(2, log_of_buffers):
        assert "whole matrices" in text
        assert planned > 2 * 2 * WIDTH * WIDTH


def test_a_plan_knows_what_the_work_on_matrices_takes():
    times = {}
    for kind in ("AdamW", "Muon"):
        document = {**DEFAULT_CONFIG, "optimizer": {"type": kind, "params": {"lr": 1e-3}}}
        question = Question(find_model("25m"), adjust(find_machine("H100"), gpus=2), document, 1, 64)
        (found,) = forecast(question, [Setting("2", {"stage": 2})], finds_batch=False)
        times[kind] = found.seconds["computation"], found.device.states
    # Of eight blocks, five iterations, shared by two GPUs; and fewer bytes of moments.
    rows = (1536, 512, 2048, 2048)
    half = 5 * 8 * sum(512 * 512 * (4 * long + 2 * 512) for long in rows) / 2 / (989e12 * 0.55)
    assert times["Muon"][0] - times["AdamW"][0] == pytest.approx(half, rel=0.1)
    assert times["Muon"][1] < 0.7 * times["AdamW"][1]


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()


def run_page(stage: int) -> list[float]:
    """The rule of the page, from its text."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    model = wide()
    matrices = [p for name, p in model.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    taken = {id(p) for p in matrices}
    for parameter in model.parameters():
        parameter.requires_grad = id(parameter) in taken
    engine = start(model, config(stage, optimizer=None), optimizer=names["NormedDescent"](matrices, lr=0.05))
    return train(engine, 6).losses


def test_the_rule_of_the_page_trains_alike_in_all_stages(on_ranks):
    for whole, sharded in zip(on_ranks(2, run_page, 0), on_ranks(2, run_page, 3), strict=True):
        assert sharded == whole


def run_configs_of_page() -> list[tuple[float, float]]:
    found = []
    for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL):
        losses = train(start(wide(), json.loads(text)), 8).losses
        found.append((losses[0], losses[-1]))
    return found


def test_the_configs_of_the_page_learn(on_ranks):
    found = on_ranks(2, run_configs_of_page)[0]
    assert len(found) == 2
    assert all(last < first for first, last in found)
