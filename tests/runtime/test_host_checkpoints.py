"""Inputs of torch's checkpoints on the host: the same bits, the order of copies, and nothing that stays behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as library
from models import config, more, rank, start, weights_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint  # held as transformers holds it

import onefold
from onefold import checkpointing
from onefold.checkpointing import Settings
from onefold.offload import activation_offload, torch_checkpoints
from onefold.offload.torch_checkpoints import HostCheckpoints

WIDTH = 8
CPU = torch.device("cpu")


class LateCopy:
    """A copy that is done when somebody waits for it."""

    def __init__(self, bus: SlowBus, source: torch.Tensor, target: torch.Tensor) -> None:
        self._bus, self._copy, self._is_done = bus, (source, target), False

    def wait_on_stream(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._copy[1].copy_(self._copy[0])

    def synchronize(self) -> None:
        self._bus.log.append("synchronize")
        self.wait_on_stream()


class SlowBus:
    """A bus between a device and a host that are both the CPU. Inputs are named by their first element."""

    crosses = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on_device: list[StorageWeakRef] = []

    def down(self, source: torch.Tensor, target: torch.Tensor) -> LateCopy:
        self.log.append(f"down {source.flatten()[0]:.0f}")
        return LateCopy(self, source, target)

    def up(self, source: torch.Tensor, target: torch.Tensor) -> LateCopy:
        self.log.append(f"up {source.flatten()[0]:.0f}")
        target.fill_(float("nan"))
        self.on_device.append(StorageWeakRef(target.untyped_storage()))
        return LateCopy(self, source, target)

    def drain(self) -> None:
        self.log.append("drain")


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> SlowBus:
    found = SlowBus()
    monkeypatch.setitem(activation_offload._buses, CPU, found)  # type: ignore[misc]
    monkeypatch.setattr(activation_offload, "_blocks", [])
    return found


class AddOne(nn.Module):
    def __init__(self, bus: SlowBus) -> None:
        super().__init__()
        self.scale, self.bus = nn.Parameter(torch.ones(WIDTH)), bus

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.bus.log.append(f"run {h.detach().flatten()[0]:.0f}")
        return (h + 1) * self.scale.cos().cosh().clamp(1, 1) * self.scale


class Stack(nn.Module):
    def __init__(self, bus: SlowBus, depth: int = 4, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddOne(bus) for _ in range(depth))
        self.reentrant = reentrant

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_copy_of_the_block_before_starts_before_a_block_is_recomputed(bus, reentrant):
    model = Stack(bus, reentrant=reentrant)
    host = HostCheckpoints(model)
    x = torch.zeros(2, WIDTH, requires_grad=True)
    loss = model(x * 1).sum()
    assert bus.log == [f"{what} {number}" for number in range(4) for what in ("down", "run")]
    bus.log.clear()
    assert host.copies.num_bytes == host.copies.peak_bytes == host.copies.down == 4 * x.nbytes
    loss.backward()
    assert bus.log == ["up 3", "up 2", "run 3", "up 1", "run 2", "up 0", "run 1", "run 0"]
    del loss
    assert torch.equal(x.grad, torch.ones_like(x))
    assert host.copies.up == 4 * x.nbytes
    assert host.copies.num_bytes == 0
    host.remove()


def test_at_most_two_inputs_are_on_the_device_in_backward(bus):
    model = Stack(bus, depth=6)
    host = HostCheckpoints(model)
    most = []
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: most.append(sum(not reference.expired() for reference in bus.on_device))
        )
    model(torch.zeros(2, WIDTH, requires_grad=True) * 1).sum().backward()
    assert max(most) == 2
    gc.collect()
    assert all(reference.expired() for reference in bus.on_device)
    host.remove()


def test_a_copy_that_is_not_used_is_waited_for(bus):
    """Check a graph that is dropped after the backward of its last block."""
    model = Stack(bus, depth=2)
    host = HostCheckpoints(model)
    x = torch.zeros(2, WIDTH, requires_grad=True)
    middle: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(lambda module, args, output: middle.append(output))
    loss = model(x * 1).sum()
    torch.autograd.grad(loss, middle[0])
    assert bus.log[-3:] == ["up 1", "up 0", "run 1"]
    del loss, middle[:]
    gc.collect()
    assert bus.log[-1] == "synchronize"
    host.remove()


def test_host_memory_is_used_again_and_freed_when_the_engine_is_closed(bus):
    model = Stack(bus)
    host = HostCheckpoints(model)
    for _ in range(2):
        model(torch.zeros(2, WIDTH, requires_grad=True) * 1).sum().backward()
        assert len(activation_offload._blocks) == 4
    small = model(torch.zeros(1, WIDTH, requires_grad=True) * 1).sum()
    assert activation_offload._blocks == []
    small.backward()
    large = model(torch.zeros(3, WIDTH, requires_grad=True) * 1).sum()
    assert activation_offload._blocks == []  # each larger block takes the place of a smaller one
    large.backward()
    assert [block.nbytes for block in activation_offload._blocks] == [4 * 3 * WIDTH] * 4
    assert "drain" in bus.log
    host.remove()
    assert activation_offload._blocks == []


def test_an_input_that_is_changed_in_place_is_an_error(bus):
    model = Stack(bus, depth=1)
    model.layers[0].forward = lambda h: h.add_(1) * 2
    host = HostCheckpoints(model)
    with pytest.raises(RuntimeError, match="was changed in place"):
        model(torch.zeros(2, WIDTH, requires_grad=True) * 1)
    host.remove()


# -- which checkpoints -------------------------------------------------------------------------------------------------


def test_checkpoints_outside_of_the_forward_and_inside_of_others_are_torchs_own(bus):
    model = Stack(bus)
    host = HostCheckpoints(model)
    x = torch.zeros(2, WIDTH, requires_grad=True)
    checkpoint(torch.sin, x * 1, use_reentrant=False).sum().backward()
    checkpoint(torch.sin, x * 1, use_reentrant=True).sum().backward()
    with torch.no_grad():
        model(x)
    assert not [line for line in bus.log if not line.startswith("run")]

    class Outer(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return checkpoint(model, h, use_reentrant=False)

    outer = Outer()
    nested = HostCheckpoints(outer)
    bus.log.clear()
    outer(x * 1).sum().backward()
    assert [line for line in bus.log if not line.startswith("run")] == ["down 0", "up 0"]
    for each in (host, nested):
        each.remove()


def test_torchs_functions_are_restored_with_the_last_engine():
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    before = [getattr(library, name) for name in names]
    one, two = HostCheckpoints(nn.Linear(1, 1)), HostCheckpoints(nn.Linear(1, 1))
    assert all(getattr(library, name) is not own for name, own in zip(names, before, strict=True))
    one.remove()
    one.remove()
    assert all(getattr(library, name) is not own for name, own in zip(names, before, strict=True))
    two.remove()
    assert [getattr(library, name) for name in names] == before
    assert not torch_checkpoints._open


def test_a_forward_that_raises_ends(bus):
    model = Stack(bus)
    host = HostCheckpoints(model)
    with pytest.raises(TypeError):
        model(None, None)
    assert torch_checkpoints.current_copies() is None
    host.remove()


def test_another_torch_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(library, "CheckpointFunction")
    with pytest.raises(onefold.ConfigError, match=r"has no torch\.utils\.checkpoint\.CheckpointFunction"):
        HostCheckpoints(nn.Linear(1, 1))
    assert not torch_checkpoints._open


def test_a_model_without_checkpoints_is_told(bus, caplog):
    host = HostCheckpoints(model := nn.Linear(WIDTH, 1))
    with caplog.at_level("WARNING", logger="onefold"):
        model(torch.ones(1, WIDTH))
        model(torch.ones(1, WIDTH))
    assert caplog.text.count("cpu_checkpointing has no effect: the first forward of Linear called no checkpoint") == 1
    host.remove()


def test_own_checkpoints_follow_their_own_settings(bus, monkeypatch):
    """Inputs of `onefold.checkpointing.checkpoint` are copied once, or not at all, and counted for the model."""

    class Own(Stack):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                h = checkpointing.checkpoint(layer, h)
            return h

    host = HostCheckpoints(model := Own(bus, depth=2))
    for on_host, expected in ((True, ["down 0", "down 1", "up 1", "up 0"]), (False, [])):
        monkeypatch.setattr(checkpointing, "_settings", Settings(cpu_checkpointing=on_host))
        bus.log.clear()
        model(torch.zeros(2, WIDTH, requires_grad=True) * 1).sum().backward()
        assert [line for line in bus.log if not line.startswith("run")] == expected
    assert host.copies.num_calls == 2
    host.remove()


# -- engines -----------------------------------------------------------------------------------------------------------


def llama(way: str) -> Any:
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    if way == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    return model.train()


def trained(way: str, stage: int, on_host: bool, keys: dict[str, Any]) -> tuple[list[float], Any, list[str]]:
    """Losses, norms, weights, and the copies of a step; half of the runs copy over a slow bus."""
    bus = SlowBus()
    activation_offload._buses[CPU] = bus  # type: ignore[assignment]
    more = {"activation_checkpointing": {"cpu_checkpointing": on_host}, **keys}
    engine = start(llama(way), config(stage, **more))
    assert ("checkpoints       inputs of" in engine.describe()) == on_host
    found, generator = [], torch.Generator().manual_seed(rank())
    for _ in range(3):
        bus.log.clear()
        torch.manual_seed(7)
        x = torch.randint(0, 97, (4, 6), generator=generator)
        loss = engine(input_ids=x, labels=x, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm() or 0.0]
    weights = {name: tensor.clone() for name, tensor in weights_of(engine.module).items()}
    copies = [line.split()[0] for line in bus.log]
    engine.close()
    del activation_offload._buses[CPU]
    checkpointing._settings, checkpointing._configured_by = Settings(), "nobody"
    return found, weights, copies


CASES: list[Any] = [
    more("non-reentrant", 3, {}),
    ("reentrant", 2, {}),
    more("lora", 3, {"onefold": {"tiled_mlp": 2, "tiled_loss": 2}}),
    ("non-reentrant", 3, {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
]


@pytest.mark.parametrize(("way", "stage", "keys"), CASES)
def test_a_model_of_transformers_has_the_same_bits_with_its_checkpoints_on_the_host(on_ranks, way, stage, keys):
    pytest.importorskip("transformers")
    if way == "lora":
        pytest.importorskip("peft")
    plain, host = (on_ranks(2, trained, way, stage, on_host, keys) for on_host in (False, True))
    for (expected, weights, none), (found, others, copies) in zip(plain, host, strict=True):
        assert found == expected
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
        assert none == []
        assert copies == ["down"] * 3 + ["up"] * 3
