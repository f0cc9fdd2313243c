"""Linear layers in FP8: values, stages, all-gathers in FP8, and what is refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import peft
import pytest
import torch
from models import Net, batches, config, first_difference, more, start, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.comm.nodes import Nodes
from onefold.config import ConfigError, load_config
from onefold.fp8 import Fp8Linear, convert_layers
from onefold.fp8.linear import Fp8State
from onefold.plan import Fp8Plan, make_plan
from onefold.tools.cli.main import main
from onefold.tools.estimate.dry_run import META, dry_run

CPU = torch.device("cpu")
EMULATED = {"enabled": True, "emulate": True}


class Wide(Net):
    """A net whose blocks can multiply in FP8, and whose head cannot."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__(width=32)
        self.recomputes = recomputes

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recomputes else block(h)
        return self.head(h)


def settings(
    stage: int, *, recipe: str = "tensorwise", all_gather: bool | None = None, **others: Any
) -> dict[str, Any]:
    fp8 = EMULATED | {"recipe": recipe} | ({} if all_gather is None else {"all_gather": all_gather})
    return config(stage, **{"fp8": fp8, "bf16": {"enabled": True}, "gradient_clipping": 0.1, **others})


def trained(stage: int, *, recomputes: bool = False, **options: Any) -> tuple[Any, int, dict[str, int]]:
    torch.manual_seed(0)
    engine = start(Wide(recomputes), settings(stage, **options))
    found = train(engine, 6)
    names = ("all-gather",)
    return found, engine.state.fp8.num_products, {name: engine.ledger.bytes(name) for name in names}


# -- values ---------------------------------------------------------------------------------------------------------


def rounded(matrix: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """A matrix as FP8 stores it, in fp64."""
    largest = matrix.double().abs().amax() if dim is None else matrix.double().abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (matrix.float() * scale).to(dtype).double() / scale.double()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_computes_the_three_products_of_rounded_matrices(recipe):
    torch.manual_seed(0)
    by_row = recipe == "rowwise"
    layer = nn.Linear(48, 32)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    convert_layers(nn.Sequential(layer), Fp8Plan(by_row=by_row, emulate=True), CPU)
    x, gradient = torch.randn(3, 7, 48, requires_grad=True), torch.randn(3, 7, 32)
    output = layer(x)
    output.backward(gradient)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rows, of_output = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    per_row, per_column = (1, 0) if by_row else (None, None)
    kind = e4m3 if by_row else e5m2
    expected = rounded(rows, e4m3, per_row) @ rounded(weight, e4m3, per_row).T + bias.double()
    to_input = rounded(of_output, kind, per_row) @ rounded(weight, e4m3, per_column)
    to_weight = rounded(of_output, kind, per_column).T @ rounded(rows, e4m3, per_column)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(output.detach().double().flatten(0, 1), expected, **close)
    torch.testing.assert_close(x.grad.double().flatten(0, 1), to_input, **close)
    torch.testing.assert_close(layer.weight.grad.double(), to_weight, **close)
    torch.testing.assert_close(layer.bias.grad, of_output.sum(0))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_zeros_stay_zeros_and_infinities_become_nan(recipe):
    layer = nn.Linear(16, 16, bias=False)
    convert_layers(nn.Sequential(layer), Fp8Plan(by_row=recipe == "rowwise", emulate=True), CPU)
    assert not layer(torch.zeros(4, 16)).any()
    x = torch.zeros(4, 16)
    x[0, 0] = torch.inf
    assert layer(x)[0].isnan().all()


def test_layers_with_the_same_input_cast_it_once(monkeypatch):
    from onefold.fp8 import linear

    casts = []
    cast = linear.to_fp8
    monkeypatch.setattr(
        linear, "to_fp8", lambda matrix, *args, **kwargs: casts.append(matrix) or cast(matrix, *args, **kwargs)
    )
    model = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    convert_layers(model, Fp8Plan(emulate=True), CPU)
    x = torch.randn(4, 16, requires_grad=True) * 1.0
    before = [layer(x) for layer in model]
    assert len(casts) == 1 + 3
    x.mul_(2)  # which the cast must follow
    assert not any(torch.equal(layer(x), old) for layer, old in zip(model, before, strict=True))
    assert len(casts) == 1 + 3 + 1 + 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_equals_that_of_torchao(recipe):
    float8 = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).bfloat16()

    ours, theirs = made(), made()
    convert_layers(ours, Fp8Plan(by_row=recipe == "rowwise", emulate=True), CPU)
    float8.convert_to_float8_training(
        theirs, config=replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    )
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    for model in (ours, theirs):
        model(x).float().square().sum().backward()
    # torchao multiplies by the scales one after the other, which may round differently.
    close = {"rtol": 2**-7, "atol": 0.0}
    torch.testing.assert_close(ours(x), theirs(x), **close)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **close)


# -- stages -----------------------------------------------------------------------------------------------------------


def problems_of_stages(world: int, options: dict[str, Any]) -> list[str]:
    recipe = options.get("recipe", "tensorwise")
    expected, products, _ = trained(0, **options)
    found = []
    for stage, all_gather in ((1, None), (2, None), (3, None), (3, False)):
        if recipe == "rowwise" and all_gather is False:
            continue
        got, of_stage, _ = trained(stage, all_gather=all_gather, **options)
        told = first_difference(got, expected)
        found += [f"stage {stage}, all_gather {all_gather}: {told}"] if told else []
        found += [] if of_stage == products else [f"stage {stage}: {of_stage} products instead of {products}"]
    steps = 6 * (4 if options.get("recomputes") else 3)
    found += [] if products == 6 * steps else [f"{products} products"]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "rowwise"},
        {"recomputes": True},
        more({"bf16": {}}),
        more({"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 8}}),
        more({"bf16": {}, "torch_autocast": {"enabled": True}}),
        more({"zero_optimization": {"overlap_comm": False}}),
        more({"onefold": {"collective": "native"}}),
        more({"onefold": {"master_dtype": "bf16_int16"}}),
        more({"onefold": {"state_dtype": "int8"}}),
        more({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [2, more(3)])
def test_stages_are_bit_equal(on_ranks, world, options):
    assert on_ranks(world, problems_of_stages, world, options) == [[]] * world


def interrupted_training(stage: int, all_gather: bool | None, folder: str) -> list[Any]:
    """Evaluation, writes, frozen layers, accumulation, and a resumed run, in one job."""
    torch.manual_seed(0)
    options = settings(stage, all_gather=all_gather, gradient_accumulation_steps=2)
    model = Wide()
    model.blocks[1].up.weight.requires_grad_(False)
    engine = start(model, options)
    found: list[Any] = [train(engine, 4)]
    engine.eval()
    with torch.no_grad():
        found.append([engine(*batch) for batch in batches(2, seed=1)])
    engine.train()
    weight = engine.module.blocks[0].up.weight
    with onefold.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.mul_(3.0)  # its scale changes
    found.append(train(engine, 2, seed=2))
    engine.save_checkpoint(folder)
    found.append(train(engine, 4, seed=3))
    engine.destroy()
    torch.manual_seed(1)
    other = Wide()
    other.blocks[1].up.weight.requires_grad_(False)
    engine = start(other, options)
    engine.load_checkpoint(folder)
    resumed = train(engine, 4, seed=3)
    told = first_difference((resumed.losses, resumed.weights), (found[-1].losses, found[-1].weights), "resumed ")
    assert told is None, told
    return found


def problems_of_interruptions(folder: str) -> list[str | None]:
    expected = interrupted_training(2, None, f"{folder}/2")
    runs = {"in FP8": (3, None), "in bf16": (3, False)}
    return [
        first_difference(interrupted_training(*run, f"{folder}/{name}"), expected, f"{name} ")
        for name, run in runs.items()
    ]


def test_evaluation_writes_frozen_layers_and_resuming_keep_stages_equal(on_ranks, tmp_path):
    assert on_ranks(2, problems_of_interruptions, str(tmp_path)) == [[None, None]] * 2


def problems_of_offload(zero: dict[str, Any], onefold: dict[str, Any]) -> list[str | None]:
    host = {"offload_optimizer": {"device": "cpu"}}
    options = {"gradient_accumulation_steps": 2, "onefold": onefold}
    expected = trained(2, zero_optimization=host, **options)[0]
    found = []
    for all_gather in (None, False):
        got = trained(3, all_gather=all_gather, zero_optimization=host | zero, **options)[0]
        found.append(first_difference(got, expected, f"all_gather {all_gather} "))
    return found


@pytest.mark.parametrize(
    ("zero", "onefold"),
    [
        ({}, {}),
        more({"overlap_comm": True}, {}),
        more({}, {"step_in_backward": True}),
        more({"offload_param": {"device": "cpu"}}, {}),
    ],
    ids=str,
)
def test_offloaded_states_keep_stages_equal(on_ranks, zero, onefold):
    assert on_ranks(2, problems_of_offload, zero, onefold) == [[None, None]] * 2


def problems_of_adapters() -> list[str | None]:
    """LoRA on frozen layers in FP8: its own layers are too narrow."""
    runs = []
    for stage, all_gather in ((0, None), (2, None), (3, None), (3, False)):
        torch.manual_seed(0)
        model = peft.get_peft_model(Wide(), peft.LoraConfig(r=4, target_modules=["up", "down"]))  # type: ignore[arg-type]
        engine = start(model, settings(stage, all_gather=all_gather))
        runs.append(train(engine, 4))
        names = set(engine.state.fp8.layers)
        assert all(name.endswith("base_layer") for name in names), names
        assert len(names) == 6
    return [first_difference(run, runs[0]) for run in runs]


def test_adapters_on_frozen_layers(on_ranks):
    assert on_ranks(2, problems_of_adapters) == [[None] * 4] * 2


def problems_of_chunks() -> list[str | None]:
    runs = [
        trained(stage, all_gather=all_gather, onefold={"batch_chunks": 2})[0]
        for stage, all_gather in ((2, None), (3, None), (3, False))
    ]
    return [first_difference(run, runs[0]) for run in runs]


def test_chunked_blocks(on_ranks):
    assert on_ranks(2, problems_of_chunks) == [[None] * 3] * 2


def losses_close_to_bf16(recipe: str) -> tuple[float, float]:
    found = []
    for fp8 in ({}, EMULATED | {"recipe": recipe}):
        torch.manual_seed(0)
        engine = start(Wide(), config(3, fp8=fp8, bf16={"enabled": True}))
        losses = []
        for x, y in batches(300, seed=5)[:30] * 10:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(sum(losses[-30:]) / 30)
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_loss_after_300_steps_is_that_of_bf16(on_ranks, recipe):
    for bf16, fp8 in on_ranks(2, losses_close_to_bf16, recipe):
        assert fp8 == pytest.approx(bf16, rel=0.01), (bf16, fp8)


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_of_gathers(all_gather: bool | None) -> tuple[int, int, int, int]:
    """Sent by all-gathers in one step, its number of FP8 weights, their elements, and the largest unit in use."""
    torch.manual_seed(0)
    nothing_kept = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    engine = start(Wide(), settings(3, all_gather=all_gather, gradient_clipping=0.0, zero_optimization=nothing_kept))
    train(engine, 3)
    before = engine.ledger.bytes("gather")
    train(engine, 1)
    params = [param for unit in engine.state.schedule.units for param in unit.params]
    in_fp8 = [param for param in params if param.spec.multiplies_in_fp8]
    held = sum(param.fp8.num_bytes for param in in_fp8 if param.fp8 is not None)
    assert held == 0, "weights are freed after a step"
    total = sum(param.layout.total for param in in_fp8)
    num = sum(len(param.parameters) for param in in_fp8)
    return engine.ledger.bytes("gather") - before, num, total, engine.model_memory.planned_buffers().unit_in_use


def test_fp8_halves_the_bytes_of_their_all_gathers(on_ranks):
    for (fp8, num, total, in_use), (bf16, _, _, before) in zip(
        on_ranks(2, bytes_of_gathers, None), on_ranks(2, bytes_of_gathers, False), strict=True
    ):
        # Each rank sends its half in forward and in backward, with one byte less per element, and its scales once.
        assert bf16 - fp8 == 2 * total // 2 - 4 * num
        assert before - in_use == total // 3 - 32 * 64  # of one of three blocks, with a transposed weight


def test_any_number_of_tokens_is_accepted():
    layer, plain = nn.Linear(16, 32), nn.Linear(16, 32)
    plain.load_state_dict(layer.state_dict())
    convert_layers(nn.Sequential(layer), Fp8Plan(emulate=True), CPU)
    products = []
    real = torch.ops.aten.mm

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is real:
                products.append(args[0].shape[1])
            return func(*args, **(kwargs or {}))

    with Sizes():
        layer(torch.randn(5, 16)).sum().backward()
    assert products == [16, 16]  # inputs need no gradient; the third contracts 5 tokens
    assert layer.weight.grad.shape == (32, 16)


# -- what is refused --------------------------------------------------------------------------------------------------


class Reads(Wide):
    """A net that adds the norm of a weight to its loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) + self.blocks[0].up.weight.float().square().mean()


def reading(fp8: dict[str, Any]) -> tuple[str, float]:
    torch.manual_seed(0)
    engine = start(Reads(), config(3, fp8=EMULATED | fp8))
    try:
        return "", train(engine, 2).losses[-1]
    except RuntimeError as error:
        return str(error), 0.0
    finally:
        engine.destroy()


def test_a_weight_that_is_read_in_a_forward_is_named(own_ranks):  # on which nothing was compiled
    for message, _ in own_ranks(2, reading, {}):
        assert "blocks.0.up.weight is all-gathered in FP8" in message
        assert "fp8.skip" in message
    (one, kept), _ = own_ranks(2, reading, {"skip": ["blocks.0.up"]})
    (other, gathered), _ = own_ranks(2, reading, {"all_gather": False})
    assert (one, other) == ("", "")
    assert kept != gathered


def test_layers_that_cannot_multiply_in_fp8_are_named(caplog):
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(64, 16),
            "wide": nn.Linear(16, 32),
            "narrow": nn.Linear(16, 30),
            "mine": nn.Linear(32, 16),
            "moe": nn.ModuleDict({"gate": nn.Linear(16, 16), "experts": nn.ModuleList([nn.Linear(16, 16)])}),
            "head": nn.Linear(16, 64),
        }
    )
    with caplog.at_level(logging.INFO, "onefold"):
        found = convert_layers(model, Fp8Plan(skip=("mine",), emulate=True), CPU)
    assert [*found.layers] == ["wide", "moe.experts.0"]
    assert found.reasons == {
        "narrow": "16 x 30 is no multiple of 16",
        "mine": "fp8.skip",
        "moe.gate": "a router of experts",
        "head": "an output head",
    }
    assert "2 linear layers, tensorwise, emulated in fp32; not narrow (16 x 30" in caplog.text
    assert type(model["wide"]) is Fp8Linear
    found.close()
    assert type(model["wide"]) is nn.Linear
    assert not hasattr(model["wide"], "fp8")


def test_a_device_without_fp8_a_pattern_without_layer_and_a_model_without_layers_raise():
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ConfigError, match=r"a cpu device has no FP8 matrix products.*fp8\.emulate"):
        convert_layers(model, Fp8Plan(), CPU)
    with pytest.raises(ConfigError, match=r"fp8\.skip: 'head' matches no linear layer. Use a name such as '0'"):
        convert_layers(model, Fp8Plan(skip=("head",), emulate=True), CPU)
    with pytest.raises(ConfigError, match=r"no layer of the model can multiply in FP8 \(0: 8 x 8 is no multiple"):
        convert_layers(nn.Sequential(nn.Linear(8, 8)), Fp8Plan(emulate=True), CPU)


@pytest.mark.parametrize(
    "zero",
    [
        {"zero_hpz_partition_size": 2},
        {"zero_quantized_weights": True},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ],
    ids=str,
)
def test_all_gathers_in_fp8_that_are_asked_for_are_not_dropped(zero):
    asked = config(3, zero_optimization=zero, fp8={"enabled": True})
    plan = make_plan(load_config(asked), 4)
    assert plan.fp8 is not None
    assert not plan.fp8.gathers
    with pytest.raises(ConfigError, match=r"fp8\.all_gather is true, but zero_optimization"):
        load_config(config(3, zero_optimization=zero, fp8={"enabled": True, "all_gather": True}))


class Bypassed(Wide):
    """A net that multiplies by a weight itself."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[0]
        return self.head(self.embed(x) + block.down(F.linear(self.embed(x), block.up.weight)))


def test_a_layer_that_is_not_called_is_named_after_the_first_step(on_ranks):
    assert on_ranks(1, warnings_of_first_step) == [
        ["blocks.0.up, blocks.1.up, blocks.1.down, blocks.2.up and 1 more did not multiply in FP8 in the first step"]
    ]


def warnings_of_first_step() -> list[str]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("onefold").addHandler(handler)
    try:
        train(start(Bypassed(), config(2, fp8=EMULATED)), 2)
    finally:
        logging.getLogger("onefold").removeHandler(handler)
    return [text.removeprefix("fp8: ").partition(". ")[0] for text in found if text.startswith("fp8: ")]


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_models_multiply_in_fp8(on_ranks, stage):
    for eager, compiled, is_compiled in on_ranks(2, compiled_and_eager, stage):
        assert is_compiled
        assert compiled == pytest.approx(eager, rel=1e-5)


def compiled_and_eager(stage: int) -> tuple[list[float], list[float], bool]:
    losses = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        engine = start(Wide(), config(stage, fp8=EMULATED))
        if backend is not None:
            engine.compile(backend=backend)
        losses.append(train(engine, 3).losses)
        layers = engine.state.fp8.layers.values()
        is_compiled = all(layer.fp8.is_compiled for layer in layers)
        engine.destroy()
    return losses[0], losses[1], is_compiled


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_block_is_one_graph_with_the_gradients_of_eager_mode(own_ranks, recipe):
    own_ranks(1, compile_a_block, recipe)


def compile_a_block(recipe: str, backend: str = "aot_eager", width: int = 32, **kind: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False), nn.GELU(), nn.Linear(2 * width, width)]
    block, x = nn.Sequential(*layers).to(**kind), torch.randn(2, width // 2, width).to(**kind)
    for layer in (block[1], block[3]):
        layer.__class__ = Fp8Linear
        layer.fp8 = Fp8State("", layer.weight, by_row=recipe == "rowwise", emulate=not kind)
    found = []
    for call in (block, torch.compile(block, backend=backend, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in block.parameters())])
        block.zero_grad()
    for eager, compiled in zip(*found, strict=True):
        assert eager.norm() > 0
        assert (compiled - eager).norm() < (0.1 if kind else 1e-5) * eager.norm()


# -- the planner ------------------------------------------------------------------------------------------------------

PLANNED: dict[str, Any] = config(3, fp8={"enabled": True, "emulate": True}, bf16={"enabled": True})


def sent_in_a_step() -> list[tuple[str, str, int, int]]:
    """What a rank of a real job sends in its third step."""
    engine = start(Wide(), PLANNED)
    for batch in batches(3):
        before = engine.ledger.copy()
        engine.backward(engine(*batch))
        engine.step()
    return [(r.operation, r.group, r.calls, r.bytes) for r in engine.ledger.since(before).rows() if r.calls]


def test_a_dry_run_sends_what_the_run_does(on_ranks):
    with META:
        model, x = Wide(), torch.zeros(4, 7, dtype=torch.long)
    planned = dry_run(model, load_config(PLANNED), Nodes.of_size(2, 2), lambda call: call(x, x), uses_nccl=False)
    rows = [(r.operation, r.group, r.calls, r.bytes) for r in planned.traffic.rows() if r.calls]
    assert on_ranks(2, sent_in_a_step) == [rows] * 2


def test_a_dry_run_counts_fp8_products_at_twice_the_speed():
    found = {}
    for name, fp8 in {"bf16": {}, "FP8": {"enabled": True}}.items():
        with META:
            model, x = Wide(), torch.zeros(4, 8, dtype=torch.long)
        document = load_config(config(2, fp8=fp8, bf16={"enabled": True}))
        found[name] = dry_run(model, document, Nodes.of_size(1, 1), lambda call, x=x: call(x, x)).trace.work.flops
    in_blocks = 3 * 6 * 2 * 32 * 32 * 64  # three products of six layers with 32 tokens
    assert found["bf16"] - found["FP8"] == in_blocks / 2


def test_a_machine_without_fp8_cannot_be_planned(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"fp8": {"enabled": True}, "bf16": {"enabled": True}}))
    assert main(["plan", "--model", "25m", "--machine", "8xA100", "--config", str(file)]) == 2
    assert "fp8.enabled: A100-80 has no FP8" in capsys.readouterr().err
