"""Activation checkpointing: the same bits with less memory, wherever inputs rest, and nothing leaks."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import Net, batches, config, more, rank, start, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import onefold
from onefold import checkpointing
from onefold.checkpointing import Settings, checkpoint, configure
from onefold.offload import activation_offload as resting

WIDTH = 16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host": {"checkpoint_in_cpu": True},
    "slots": {"contiguous_checkpointing": True, "num_checkpoints": 8},
    "host slots": {"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "num_checkpoints": 8},
    "watched": {"synchronize": True, "profile": True, "partition_activations": True},
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def unconfigured() -> None:
    checkpointing._settings, checkpointing._configured_by = Settings(), "nobody"
    checkpointing.reset()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    unconfigured()
    yield
    unconfigured()


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_loaded() -> None:
    """torch loads its compiler with the first checkpoint of a process; that call's inputs stay until a `collect`."""
    torch_checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    gc.collect()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(nn.functional.dropout(torch.tanh(self.up(self.norm(h))), 0.3))


class Stack(nn.Sequential):
    def __init__(self, depth: int = 3) -> None:
        torch.manual_seed(3)
        super().__init__(*(Layer() for _ in range(depth)))

    def run(self, h: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
        for layer in self:
            h = call(layer, h)
        return h


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def random_input(device: str = "cpu", rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


def outcome(case: Callable[..., Any], call: Callable[..., Any], *args: Any) -> list[torch.Tensor]:
    """The loss, the next random numbers and the gradients of a case; `case(call, *args)` gives loss and leaves."""
    torch.manual_seed(11)
    loss, leaves = case(call, *args)
    after = torch.rand(3, device=loss.device)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), after, torch.rand(3, device=loss.device), *(g for g in gradients if g is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- the same bits -----------------------------------------------------------------------------------------------------


def stacked(call: Callable[..., Any], device: str) -> Any:
    model, x = Stack().to(device), random_input(device)
    return model.run(x * 2, call).square().mean(), [x, *model.parameters()]


def under_autocast(call: Callable[..., Any], device: str) -> Any:
    model, x = Stack().to(device), random_input(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        h = model.run(x * 2, call)
    return h.float().square().mean(), [x, *model.parameters()]  # The backward runs outside.


def structures(call: Callable[..., Any], device: str) -> Any:
    """Nested arguments, keywords, tensors without gradients, integers, None, a parameter, several outputs."""

    def function(h: Any, pair: Any, table: Any, power: Any, *, ids: Any, shift: Any = None, weight: Any) -> Any:
        assert shift is None
        first, (second, scale) = pair
        h = nn.functional.dropout(h * second + first, 0.5) ** power
        return h @ weight, {"rows": table["embed"][ids] * scale, "text": "text"}, [h.detach()]

    x, embed = random_input(device), random_input(device, 7)
    weight = nn.Parameter(torch.eye(WIDTH, device=device))
    ids = torch.tensor([0, 3, 6, 1, 1], device=device)
    h, extra, others = call(
        function, x * 1, (x.cos(), (x.detach(), 0.25)), {"embed": embed}, 2, ids=ids, weight=weight, shift=None
    )
    assert extra["text"] == "text"
    return h.sum() + extra["rows"].square().sum() + others[0].sum(), [x, embed, weight]


def only_keywords(call: Callable[..., Any], device: str) -> Any:
    x = random_input(device)
    return call(lambda *, h: nn.functional.dropout(h, 0.5), h=x * 1).square().sum(), [x]


def nested(call: Callable[..., Any], device: str) -> Any:
    model, x = Stack().to(device), random_input(device)
    return call(lambda h: model.run(h.sin(), call), x * 2).square().mean(), [x, *model.parameters()]


def strided(call: Callable[..., Any], device: str) -> Any:
    """Transposed, expanded and sliced inputs."""
    x = random_input(device)
    with_gaps = x.repeat(4, 1)[::4].t()
    h = call(lambda a, b, c: (a @ b).tanh() * c, (x * 2).t(), x[:, :1].expand(-1, 5), with_gaps)
    return h.sum(), [x]


def without_tensors(call: Callable[..., Any], device: str) -> Any:
    weight = random_input(device)
    return call(lambda power: weight.tanh() ** power, 3).sum(), [weight]


CASES = [stacked, under_autocast, structures, only_keywords, nested, strided, without_tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_random_numbers_are_bit_equal(case, kind, device):
    wanted = outcome(case, plainly, device)
    configure(**KINDS[kind])
    assert same(outcome(case, checkpoint, device), wanted)
    assert same(outcome(case, checkpointing.non_reentrant_checkpoint, device), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_runs_once_forward_and_once_again_for_each_backward(kind):
    configure(**KINDS[kind])
    x, runs = random_input(), []
    loss = checkpoint(lambda h: (runs.append(1), h.sin().cos())[1], x * 1).sum()
    assert len(runs) == 1
    gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    assert len(runs) == 3
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_only_calls(kind, mode):
    configure(**KINDS[kind])
    x = random_input()
    with mode():
        for _ in range(10):  # More than there are slots.
            assert torch.equal(checkpoint(torch.sin, x), x.sin())
    assert not resting._buffers


@pytest.mark.parametrize("kind", ["plain", "host"])
def test_a_change_in_place_is_an_error_as_in_torch(kind):
    configure(**KINDS[kind])
    h = random_input() * 1
    loss = checkpoint(torch.sin, h).sum()
    h.add_(1)
    with pytest.raises(RuntimeError, match=r"inplace operation|changed in place"):
        loss.backward()


def test_a_slot_is_a_copy_so_a_change_in_place_does_no_harm():
    configure(**KINDS["slots"])
    x = random_input()
    h = x * 1
    loss = checkpoint(torch.sin, h).sum()
    h.add_(1)
    assert torch.equal(torch.autograd.grad(loss, x)[0], x.cos())


def test_a_compiled_caller_gets_torchs_own():
    configure(**KINDS["slots"])
    x, layer = random_input(), nn.Linear(WIDTH, WIDTH)

    def function(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda inner: layer(inner).tanh(), h.sin())

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    got, wanted = (torch.autograd.grad(run(x).sum(), [x, layer.weight]) for run in (compiled, function))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_no_input_outlives_its_call_but_in_its_resting_place():
    """Neither torch nor the wrapper holds the caller's tensor: a copy rests in its place."""
    for kind in ("slots", "host slots"):
        configure(**KINDS[kind])
        h = random_input() * 1
        storage = StorageWeakRef(h.untyped_storage())
        loss = checkpoint(lambda h: h.sin().cos(), h).sum()
        del h
        assert storage.expired(), kind
        loss.backward()


def pointers(model: Stack, steps: int = 1, backward: bool = True) -> list[list[int]]:
    """Where the inputs of each step's recomputations lie, in the order of the calls."""
    found: list[list[int]] = []
    for _ in range(steps):
        seen: list[int] = []

        def watch(layer: nn.Module, h: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen.append(h.data_ptr())
            return layer(h)

        loss = model.run(random_input() * 2, lambda layer, h, watch=watch: checkpoint(watch, layer, h)).sum()
        seen.clear()
        if backward:
            loss.backward()
        found.append(seen[::-1])
    return found


def test_slots_lie_in_one_buffer_and_are_used_again_in_every_step():
    configure(contiguous_checkpointing=True, num_checkpoints=3)
    first, second, third = pointers(Stack(3), steps=3)
    assert first == second == third
    assert len(set(first)) == 3
    ((line, free),) = resting._buffers.values()
    assert all(line.data_ptr() <= place < line.data_ptr() + line.nbytes for place in first)
    assert line.nbytes == 3 * 512  # 5 x 16 floats are 320 bytes; slots are aligned.
    assert sorted(free) == [0, 1, 2]


def test_more_checkpoints_than_slots_is_an_error_that_names_the_key():
    configure(contiguous_checkpointing=True, num_checkpoints=2)
    with pytest.raises(onefold.ConfigError, match=r"activation_checkpointing.number_checkpoints = 2: .*\[5, 16\]"):
        Stack(3).run(random_input() * 1, checkpoint)
    pointers(Stack(2), steps=2)  # The slots of the failed forward are free again.
    checkpointing.set_num_layers(3)
    pointers(Stack(3), steps=2)


def test_a_graph_that_is_dropped_gives_its_slots_back():
    configure(contiguous_checkpointing=True, num_checkpoints=2)
    for _ in range(3):
        loss = Stack(2).run(random_input() * 1, checkpoint).sum()
        ((_, free),) = resting._buffers.values()
        assert free == []
        del loss
        assert len(free) == 2


def test_a_backward_that_fails_gives_its_slots_back():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on purpose")

    configure(contiguous_checkpointing=True, num_checkpoints=2)
    for _ in range(3):
        loss = Stack(2).run(Fails.apply(random_input() * 1), checkpoint).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()


def test_a_graph_left_in_a_cycle_gives_its_slots_back():
    configure(contiguous_checkpointing=True, num_checkpoints=2)
    gc.disable()
    try:
        for _ in range(3):
            cycle: list[Any] = [Stack(2).run(random_input() * 1, checkpoint)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()


def test_two_inputs_of_one_shape_count_as_one_call():
    configure(contiguous_checkpointing=True, num_checkpoints=2)
    x = random_input()
    h = residual = x * 1
    for _ in range(2):
        h, residual = checkpoint(lambda h, residual: (h.sin() + residual, h * residual), h, residual)
    (h + residual).sum().backward()
    assert len(resting._buffers) == 2


def test_a_new_shape_replaces_buffers_that_nobody_uses():
    configure(contiguous_checkpointing=True, num_checkpoints=2)
    for rows in (3, 4, 5):
        Stack(2).run(random_input(rows=rows) * 1, checkpoint).sum().backward()
        assert len(resting._buffers) == 1
    alive = checkpoint(torch.sin, random_input(rows=7) * 1)
    checkpoint(torch.sin, random_input(rows=8) * 1)
    assert len(resting._buffers) == 2
    assert alive.grad_fn is not None
    checkpointing.reset()
    assert not resting._buffers
    alive.sum().backward()


def test_parameters_and_integers_take_no_slot():
    configure(contiguous_checkpointing=True, num_checkpoints=1)
    weight, ids = nn.Parameter(torch.ones(4, 4)), torch.arange(4)
    checkpoint(lambda weight, ids: weight.sin()[ids], weight, ids).sum().backward()
    assert not resting._buffers


def test_inside_another_checkpoint_nothing_rests():
    configure(contiguous_checkpointing=True, num_checkpoints=1)
    loss, _ = nested(checkpoint, "cpu")
    loss.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["host", "host slots"])
def test_inputs_on_the_host_leave_the_device(kind):
    depth, rows = 6, 1 << 16
    model, size = Stack(depth).cuda(), rows * WIDTH * 4

    def held(**settings: Any) -> tuple[int, torch.Tensor]:
        configure(**settings)
        x = random_input("cuda", rows)
        model.run(x * 1, checkpoint).sum().backward()  # Work spaces of the libraries are there from here on.
        model.zero_grad()
        gc.collect()
        torch.manual_seed(2)
        before = torch.cuda.memory_allocated()
        loss = model.run(x * 1, checkpoint).square().sum()
        kept = torch.cuda.memory_allocated() - before
        return kept, torch.autograd.grad(loss, x)[0]

    kept, gradient = held()
    kept_by_host, gradient_by_host = held(**KINDS[kind])
    assert kept - kept_by_host == depth * size
    assert torch.equal(gradient, gradient_by_host)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_copy_to_the_host_waits_for_what_it_copies_and_is_waited_for():
    """A busy compute stream, a source that is overwritten as soon as it is free, and a slot that is used again."""
    configure(checkpoint_in_cpu=True, contiguous_checkpointing=True, num_checkpoints=1)
    for step in range(4):
        x = torch.zeros(1 << 22, device="cuda", requires_grad=True)
        torch.cuda._sleep(50_000_000)
        h = x + step
        loss = checkpoint(torch.square, h).sum()
        del h
        torch.full((1 << 22,), 99.0, device="cuda")  # Takes the memory that the input had.
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x.grad, 2 * step))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_function_that_changes_its_input_is_told_so():
    configure(checkpoint_in_cpu=True)
    with pytest.raises(RuntimeError, match="changed in place"):
        checkpoint(lambda h: h.mul_(2).sin(), random_input("cuda") * 1)


# -- settings ----------------------------------------------------------------------------------------------------------


SECTION = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


def test_configure_reads_a_dict_a_file_or_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"activation_checkpointing": SECTION}))
    document = {"activation_checkpointing": SECTION}
    for source in (document, path, str(path), onefold.config.load_config(document)):
        unconfigured()
        assert not checkpointing.is_configured()
        configure(deepspeed_config=source)
        assert checkpointing.is_configured()
        assert checkpointing.settings() == Settings(**SECTION)


def test_arguments_win_over_the_config_and_the_rest_is_the_default():
    configure(None, {"activation_checkpointing": SECTION}, checkpoint_in_cpu=False, num_checkpoints=7, profile=False)
    changes = {"cpu_checkpointing": False, "number_checkpoints": 7, "profile": False}
    assert checkpointing.settings() == Settings(**{**SECTION, **changes})
    configure(synchronize=True)
    wanted = Settings(synchronize_checkpoint_boundary=True)
    assert dataclasses.replace(checkpointing.settings(), number_checkpoints=None) == wanted


def test_slots_need_a_number():
    configure(contiguous_checkpointing=True)  # a number may still come
    with pytest.raises(onefold.ConfigError, match=r"activation_checkpointing.number_checkpoints"):
        checkpoint(torch.sin, random_input())
    with pytest.raises(onefold.ConfigError, match="number_checkpoints = 0: expected at least 1"):
        configure(num_checkpoints=0)
    checkpointing.set_num_layers(5)
    configure(contiguous_checkpointing=True)
    assert checkpointing.settings().number_checkpoints == 5


class Mpu:
    def __init__(self, size: int) -> None:
        self.get_model_parallel_world_size = lambda: size


def test_a_model_parallel_group_of_one_is_fine_and_others_are_not():
    configure(Mpu(1))
    with pytest.raises(ValueError, match="model-parallel size is 2"):
        configure(Mpu(2))


def test_partitioning_has_nothing_to_do_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("onefold"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="onefold"):
        configure(partition_activations=True)
        assert "no model-parallel group" in caplog.text
        caplog.clear()
        checkpointing.partition_activations_in_checkpoint(False)
        assert not caplog.text
        checkpointing.partition_activations_in_checkpoint(True)
        assert "no model-parallel group" in caplog.text
    assert checkpointing.settings().partition_activations


def test_a_profile_counts_and_logs_every_call(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("onefold"), "propagate", True)
    configure(profile=True)
    with caplog.at_level(logging.INFO, logger="onefold"):
        loss = Stack(3).run(random_input() * 1, checkpoint).sum()
        seen = checkpointing.times()
        assert seen["calls"] == 3
        assert seen["forward"] > 0
        assert seen["recompute"] == 0
        loss.backward()
    assert checkpointing.times()["recompute"] > 0
    assert checkpointing.times()["calls"] == 3
    assert caplog.text.count("checkpoint of Layer: forward") == 3
    assert caplog.text.count("checkpoint of Layer: recompute") == 3
    checkpointing.reset()
    assert set(checkpointing.times().values()) == {0}
    assert checkpointing.is_configured()


def test_a_profile_counts_a_checkpoint_inside_another_with_the_outer_one(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("onefold"), "propagate", True)
    configure(profile=True)
    with caplog.at_level(logging.INFO, logger="onefold"):
        nested(checkpoint, "cpu")
    assert checkpointing.times()["calls"] == 1
    assert caplog.text.count(": forward") == 1
    checkpointing.reset()


def test_the_module_is_found_under_onefold():
    assert onefold.checkpointing is checkpointing


# -- through the engine ------------------------------------------------------------------------------------------------


class DroppingNet(Net):
    """A model with dropout in every block, whose blocks run through `call`."""

    call: Callable[..., Any] = staticmethod(plainly)

    def block(self, index: int, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.blocks[index](h), 0.2)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for index in range(len(self.blocks)):
            h = self.call(self.block, index, h)
        return self.head(h)


def trained(stage: int, call: Callable[..., Any], **settings: Any) -> Any:
    torch.manual_seed(5)
    model = DroppingNet()
    model.call = call
    torch.manual_seed(7 + rank())
    return train(start(model, config(stage, **settings)), num_micro_steps=3)


def bit_equal_through_the_engine(stage: int) -> list[str]:
    wanted = trained(stage, plainly)
    differ = []
    for name, reentrant in (("reentrant", True), ("non-reentrant", False)):
        run = trained(stage, lambda *args, reentrant=reentrant: torch_checkpoint(*args, use_reentrant=reentrant))
        differ += [] if run.same(wanted) else [name]
    for name, arguments in KINDS.items():
        configure(**arguments)
        differ += [] if trained(stage, checkpoint).same(wanted) else [name]
    unconfigured()
    section = {"contiguous_memory_optimization": True, "number_checkpoints": 3}
    differ += [] if trained(stage, checkpoint, activation_checkpointing=section).same(wanted) else ["by config"]
    unconfigured()
    return differ


@pytest.mark.parametrize("stage", [1, 3, more(0), more(2)])
def test_training_through_the_engine_is_bit_equal(on_ranks, stage):
    assert on_ranks(2, bit_equal_through_the_engine, stage) == [[], []]


def read_by_initialize() -> list[Any]:
    unconfigured()
    found: list[Any] = []
    start(Net(), config(1))
    found.append(checkpointing.is_configured())
    start(Net(), config(1, activation_checkpointing={"cpu_checkpointing": True}))
    found.append((checkpointing.is_configured(), checkpointing.settings().cpu_checkpointing))
    start(Net(), {**config(1), "activation_checkpointing.profile": False})
    found.append(checkpointing.settings().cpu_checkpointing)
    configure(synchronize=True)
    start(Net(), config(1, activation_checkpointing={"cpu_checkpointing": True}))
    found.append((checkpointing.settings().synchronize_checkpoint_boundary, checkpointing.settings().cpu_checkpointing))
    unconfigured()
    start(Net(), config(1, activation_checkpointing={"contiguous_memory_optimization": True}))
    try:
        checkpoint(torch.sin, random_input())
    except onefold.ConfigError as error:
        found.append("activation_checkpointing.number_checkpoints" in str(error))
    unconfigured()
    return found


def test_initialize_reads_the_section_and_a_call_of_configure_wins(on_ranks):
    assert on_ranks(1, read_by_initialize) == [[False, (True, True), False, (True, False), True]]


def too_many_then_trains() -> bool:
    """A step that runs out of slots leaves an engine that trains on."""
    unconfigured()
    model = DroppingNet()
    model.call = checkpoint
    engine = start(model, config(2, activation_checkpointing=SECTION | {"number_checkpoints": 2, "profile": False}))
    x, y = batches(1)[0]
    with pytest.raises(onefold.ConfigError):
        engine(x, y)
    checkpointing.set_num_layers(3)
    before = [parameter.clone() for parameter in model.parameters()]
    engine.backward(engine(x, y))
    engine.step()
    unconfigured()
    return all(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_an_engine_goes_on_after_too_many_checkpoints(on_ranks):
    assert on_ranks(2, too_many_then_trains) == [True, True]
