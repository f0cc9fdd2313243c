"""Parameters that an engine holds, as a user's program meets them: at rest, inside a pass, written to, kept, frozen.

Each case runs on every rank and returns None, or what was wrong first.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from covering import covering
from models import config, more, precision, rank, start, weights_of
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.comm import local_device
from onefold.runtime import handle_of
from onefold.runtime.unit_state import ParameterState
from onefold.zero import GatheredParameters

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "2 offload": (2, OFFLOAD),
    "3 offload": (3, {**OFFLOAD, "offload_param": {"device": "cpu"}}),
    "3 persistent": (3, {"stage3_param_persistence_threshold": 10_000}),
    "3 nothing kept": (3, {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}),
}
WHOLE = ["0", "1", "2", "2 offload", "3 persistent"]


def settings(plan: str, **rest: Any) -> dict[str, Any]:
    stage, zero = PLANS[plan]
    zero = {**zero, **rest.pop("zero_optimization", {})}
    return config(stage, zero_optimization=zero, **{"optimizer": SGD, **rest})


def net(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), inner, nn.Linear(width, 4))


def data(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank, so that plain torch on one of them is the reference."""
    made = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(4, 16, generator=made), torch.randn(4, 4, generator=made)
    return x.to(local_device(), dtype), y.to(local_device(), dtype)


def mse(model: nn.Module, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, y)


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Beside:
    """An engine and plain torch, step by step on the same batches."""

    def __init__(self, plan: str, make: Callable[[], nn.Module] = net, **rest: Any) -> None:
        model = make()
        self.plain = copy.deepcopy(model).to(local_device())
        self.engine = start(model, settings(plan, **rest))
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9)
        self.steps = 0

    def step(self, loss: Loss = mse) -> None:
        x, y = data(self.steps)
        self.engine.backward(loss(self.engine.module, self.engine(x), y))
        self.engine.step()
        self.optimizer.zero_grad()
        loss(self.plain, self.plain(x), y).backward()
        self.optimizer.step()
        self.steps += 1

    def difference(self, tolerance: float = 1e-6) -> str | None:
        found, expected = weights_of(self.engine.module), self.plain.state_dict()
        for name, tensor in expected.items():
            off = float((found[name].double().cpu() - tensor.double().cpu()).abs().max()) if tensor.numel() else 0.0
            if not off <= tolerance:
                return f"after {self.steps} steps {name} is off by {off:.3g}"
        return None


def refusal(work: Callable[[], Any], *words: str) -> str | None:
    """None if it raises and says all of the words."""
    try:
        work()
    except (RuntimeError, ValueError) as error:
        missing = [word for word in words if word not in str(error)]
        return f"{missing} not in: {error}" if missing else None
    return f"nothing was raised (expected {words})"


# -- at rest ----------------------------------------------------------------------------------------------------


def written(parameter: nn.Parameter, function: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        function(parameter)


VALUE_OPERATIONS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "detached norm": lambda p: p.detach().norm(),
    "data norm": lambda p: p.data.abs().sum(),
    "lerp into": lambda p: written(p, lambda q: torch.zeros(3).lerp_(q, 0.1)),
    "foreach": lambda p: torch._foreach_mul([p.detach()], 2.0),
    "clamp_": lambda p: written(p, lambda q: q.clamp_(0, 1)),
    "data mul_": lambda p: p.data.mul_(2),
    "init": lambda p: nn.init.ones_(p),
    "assigned": lambda p: setattr(p, "data", torch.ones(3)),
    "numpy": lambda p: p.detach().numpy(),
    "cpu numpy": lambda p: p.detach().cpu().numpy(),
    "array": lambda p: numpy.asarray(p.detach()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "numpy dlpack": lambda p: numpy.from_dlpack(p.detach()),
    "list": lambda p: p.tolist(),
    "item": lambda p: p.item(),
    "index": lambda p: p[0],
    "compare": lambda p: torch.equal(p, torch.ones(3)),
    "clone": lambda p: p.detach().clone(),
    "clone read": lambda p: p.detach().clone().tolist(),
    "view read": lambda p: p.view(-1).sum(),
    "slice read": lambda p: p.data[:2].max(),
    "cast scaled": lambda p: p.bfloat16().mul_(2),
    "data loaded": lambda p: p.data.copy_(torch.ones(3)),
    "cast copied": lambda p: torch.empty(0).copy_(p.bfloat16()),
    "safetensors": lambda p: safetensors.torch.save({"p": p.detach()}),
    "safetensors of a cast": lambda p: safetensors.torch.save({"p": p.bfloat16()}),
    "like": lambda p: torch.zeros_like(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "matrix product": lambda p: torch.ones(3) @ p,
    "cast": lambda p: p.half() + 1,
    "shared": lambda p: p.detach().share_memory_(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "saved": lambda p: torch.save(p, io.BytesIO()),
    "data saved": lambda p: torch.save(p.data, io.BytesIO()),
}


def values_at_rest(initialised: bool) -> list[str]:
    """Names of operations that did not raise as they should."""
    if initialised:
        model: nn.Module = start(net(), settings("3 nothing kept")).module
    else:
        with onefold.zero.Init():
            model = net()
    weight = model[0].weight
    found = []
    # Code that initialises runs on every rank, and a copy raises when it is read.
    served = set() if initialised else {"clamp_", "init", "clone"}
    for name, operation in VALUE_OPERATIONS.items():
        if name in served:
            continue
        problem = refusal(lambda operation=operation: operation(weight), "weight", "GatheredParameters")
        found += [f"{name}: {problem}"] if problem else []
    return found


@pytest.mark.parametrize("initialised", [True, False], ids=["engine", "Init"])
def test_values_of_a_parameter_at_rest_raise(on_ranks, initialised):
    assert on_ranks(2, values_at_rest, initialised) == [[], []]


DERIVED: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "float": lambda p: p.float(),
    "bfloat16": lambda p: p.bfloat16(),
    "to": lambda p: p.to(torch.float64),
    "to same": lambda p: p.to(p.dtype),
    "type": lambda p: p.type(torch.float16),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "detach cast": lambda p: p.detach().float(),
    "data cast": lambda p: p.data.to(torch.bfloat16),
    "clone": lambda p: p.clone(),
    "detach clone": lambda p: p.detach().clone(),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: torch.reshape(p, (-1,)),
    "flatten": lambda p: p.detach().flatten(),
    "transposed": lambda p: p.data.t(),
    "T": lambda p: p.data.T,
    "slice": lambda p: p[:1],
    "contiguous": lambda p: p.data.contiguous(),
}
INITIALISED: dict[str, Callable[[torch.Tensor], Any]] = {
    "nn.init.normal_": lambda t: nn.init.normal_(t, std=0.02),
    "nn.init.uniform_": nn.init.uniform_,
    "nn.init.constant_": lambda t: nn.init.constant_(t, 3.0),
    "nn.init.zeros_": nn.init.zeros_,
    "nn.init.ones_": nn.init.ones_,
    "nn.init.trunc_normal_": nn.init.trunc_normal_,
    "nn.init.trunc_normal_, narrow": lambda t: nn.init.trunc_normal_(t, a=-0.1, b=0.1),
    "nn.init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "normal_": lambda t: t.normal_().clamp_(-1, 1).mul_(2),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(1),
    "fill_ with a tensor": lambda t: t.fill_(torch.tensor(1.0)),
    "random_": lambda t: t.random_(5),
}
ADDRESSES: dict[str, Callable[[torch.Tensor], int]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage().data_ptr(),
    "size": lambda t: t.untyped_storage().nbytes(),
}


def derived_before_initialize() -> list[str]:
    """Names of calls on derived tensors that raise, that change a parameter, or that an engine does not stop."""
    torch.manual_seed(3)
    with onefold.zero.Init():
        model = net()
    before, found = {name: value.clone() for name, value in weights_of(model).items()}, []
    weight, numbers = model[0].weight, torch.get_rng_state()
    for source, derive in DERIVED.items():
        for name, call in (INITIALISED | ADDRESSES).items():
            with torch.no_grad():
                result = call(derive(weight))
            if name in ADDRESSES and result != 0:
                found.append(f"{name} of {source} is {result}")
    found += [] if torch.equal(torch.get_rng_state(), numbers) else ["random numbers were used"]
    found += [f"{name} changed" for name, value in weights_of(model).items() if not torch.equal(value, before[name])]
    kept = {name: derive(weight) for name, derive in DERIVED.items()}
    engine = start(model, settings("3 nothing kept"))
    for source, derive in DERIVED.items():
        for name, call in (INITIALISED | ADDRESSES).items():
            works: dict[str, Callable[[], Any]] = {
                "new": lambda derive=derive, call=call: call(derive(engine.module[0].weight)),
                "kept": lambda source=source, call=call: call(kept[source]),
            }
            for age, work in works.items():
                problem = refusal(work, "weight", "GatheredParameters")
                found += [f"after initialize, {name} of {age} {source}: {problem}"] if problem else []
    return found


def test_initialising_a_derived_tensor_has_no_effect_before_initialize_and_raises_after(on_ranks):
    assert on_ranks(2, derived_before_initialize) == [[], []]


def guarded_normal(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    return tensor if getattr(tensor, "_is_hf_initialized", False) else plain_normal(tensor, **options)


guarded_normal.__name__, plain_normal = "normal_", nn.init.normal_


def loaded_as_by_transformers() -> list[str]:
    """What `from_pretrained` does to a sharded model after it has loaded it, in three releases."""
    with onefold.zero.Init(dtype=torch.bfloat16):
        model = net()
    before, head = weights_of(model), model[-1].weight
    found = []
    addresses = {tensor.data_ptr() for tensor in model.state_dict().values()}  # 5.2.0, looking for tied weights
    found += [] if addresses == {0} else [f"addresses {addresses}"]
    with GatheredParameters([head], modifier_rank=0):  # 5.8.0: the head is missing in the checkpoint
        if rank() == 0:
            with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.init, "normal_", guarded_normal)  # its functions stand in for torch's meanwhile
                nn.init.constant_(head, 0.5)
                for parameter in model.parameters():
                    nn.init.normal_(parameter.float())
    for name, parameter in model.named_parameters():
        parameter._is_hf_initialized = name != "0.weight"
    missing = [value for value in model.state_dict().values() if not value._is_hf_initialized]
    with GatheredParameters(missing, modifier_rank=0):  # 4.57.6: initialised through `.data`, on every rank
        model[0].weight.data.fill_(0.25)
    written = {"3.weight": 0.5, "0.weight": 0.25}
    for name, value in weights_of(model).items():
        expected = torch.full_like(value, written[name]) if name in written else before[name]
        found += [] if torch.equal(value, expected) else [f"{name} changed"]
    return found


def test_calls_of_transformers_after_loading_leave_the_weights(on_ranks):
    assert on_ranks(2, loaded_as_by_transformers) == [[], []]


def metadata_at_rest() -> str | None:
    engine = start(net(), settings("3 nothing kept"))
    weight = engine.module[0].weight
    expected = {"shape": (0,), "dtype": torch.float32, "device": torch.device("cpu"), "requires_grad": True, "ndim": 1}
    expected |= {"grad": None, "is_leaf": True, "is_cuda": False, "grad_fn": None}
    for name, value in expected.items():
        if getattr(weight, name) != value:
            return f"{name} is {getattr(weight, name)}"
    calls = [weight.numel() == 0, weight.size() == (0,), weight.is_floating_point(), isinstance(weight, nn.Parameter)]
    calls += [hash(weight) == id(weight), weight in {weight: 1}, "Parameter" in repr(weight), weight.data.numel() == 0]
    calls += [
        weight.detach().numel() == 0,
        weight.to("cpu").dtype is torch.float32,
        type(weight).__name__ == "Parameter",
    ]
    if not all(calls):
        return f"calls {calls}"
    before = engine.ledger.calls("gather")
    (
        list(engine.module.parameters()),
        dict(engine.module.named_parameters()),
        torch.optim.SGD(engine.module.parameters()),
    )
    engine.module.to(torch.float32)
    engine.module.to("cpu")
    return None if engine.ledger.calls("gather") == before else "iterating gathered"


def test_metadata_of_a_parameter_at_rest_stays(on_ranks):
    assert on_ranks(2, metadata_at_rest) == [None, None]


# -- inside a pass ----------------------------------------------------------------------------------------------


def squares(model: nn.Module) -> torch.Tensor:
    return sum((p.pow(2).sum() for p in model.parameters()), torch.zeros((), device=local_device()))


class Penalised(nn.Module):
    """Reads parameters of its children in its forward, by every road."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = net(), way
        self.kept = [*self.net.parameters()] if way == "kept list" else []
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "functional_call":
            weights = {name: 1.5 * weight for name, weight in self.net.named_parameters()}
            return torch.func.functional_call(self.net, weights, (x,))
        if self.way == "no_grad":
            with torch.no_grad():
                self.seen.append(sum(float(p.norm()) for p in self.net.parameters()))
            return self.net(x)
        if self.way == "views":
            first = next(self.net.parameters())
            return self.net(x) + 0.1 * first.t().flatten()[:4] + first.detach()[0, :4]
        parameters = self.kept or self.net.parameters()
        return self.net(x) + 0.01 * sum((p.abs().sum() for p in parameters), torch.zeros((), device=local_device()))


def penalised(plan: str, way: str) -> str | None:
    loss: Loss = mse
    if way == "after":
        loss = lambda model, out, y: mse(model, out, y) + 0.1 * squares(model)  # noqa: E731
    if way == "elastic":
        anchors = [p.detach().clone() for p in net().to(local_device()).parameters()]

        def loss(model: nn.Module, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            pairs = zip(model.parameters(), anchors, strict=True)
            return mse(model, out, y) + sum((3.0 * (p - a).pow(2)).sum() for p, a in pairs)

    make: Callable[[], nn.Module] = net if way in ("after", "elastic") else lambda: Penalised(way)
    both = Beside(plan, make)
    for _ in range(3):
        both.step(loss)
        resting = [p.numel() == 0 for p in both.engine.module.parameters()]
        if plan == "3 nothing kept" and not all(resting):
            return f"not at rest after a step: {resting}"
    if way == "no_grad" and not numpy.allclose(both.engine.module.seen, both.plain.seen):
        return f"norms {both.engine.module.seen}, plain torch {both.plain.seen}"
    return both.difference()


@covering(
    plan=("3 nothing kept", "3", "2", "3 offload"),
    way=("after", "elastic", "inside", "kept list", "functional_call", "no_grad", "views"),
    strength=1,
)
def test_operations_on_parameters_inside_a_pass_equal_plain_torch(on_ranks, plan, way):
    assert on_ranks(2, penalised, plan, way) == [None, None]


def unsharded_units(engine: onefold.Engine) -> list[str]:
    return [unit.name for unit in engine.state.schedule.units if unit.param_state is not ParameterState.SHARDED]


def released_after_an_operation() -> str | None:
    engine = start(net(), settings("3 nothing kept"))
    x, y = data(0)
    out = engine(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            value = next(engine.module.parameters()).pow(2).sum()
        if unsharded_units(engine):
            return f"unsharded after an operation (grad {grad}): {unsharded_units(engine)}"
    most = []

    def count(gradient: torch.Tensor) -> torch.Tensor:
        most.append(len(unsharded_units(engine)))
        return gradient

    penalties = [p.pow(2).sum() for p in engine.module.parameters()]
    for penalty in penalties:
        penalty.register_hook(count)
    engine.backward(F.mse_loss(out, y) + value + sum(penalties))
    if max(most) > 1:
        return f"{max(most)} units unsharded at once in backward"
    return f"left over {unsharded_units(engine)}" if unsharded_units(engine) else None


def test_a_unit_is_released_after_an_operation_and_unsharded_for_its_backward(on_ranks):
    assert on_ranks(2, released_after_an_operation) == [None, None]


def writes_inside_a_pass() -> str | None:
    engine = start(net(), settings("3 nothing kept"))
    x, y = data(0)
    out = engine(x)
    with torch.no_grad():
        problem = refusal(lambda: next(engine.module.parameters()).mul_(2), "0.weight", "GatheredParameters")
        if problem:
            return f"by an operation: {problem}"
        engine.module[0].weight.mul_(2)  # a read by attribute unshards until the pass ends, which then finds the write
    problem = refusal(lambda: engine.backward(F.mse_loss(out, y)), "0.weight", "write in place")
    if problem:
        return f"by attribute: {problem}"
    engine.destroy()

    class Renormalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(8, 16, max_norm=0.1), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(x))

    engine = start(Renormalised(), settings("3 nothing kept"))
    problem = refusal(lambda: engine(torch.arange(4, device=local_device())), "embed.weight", "write in place")
    if problem:
        return f"in a forward: {problem}"
    engine.destroy()

    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if write:
                self.weight.data.clamp_(-0.01, 0.01)
            else:
                self.weight.data.abs().sum()
            return super().forward(x)

    engine = start(nn.Sequential(Clamped(16, 16), Clamped(16, 4)), settings("3 nothing kept"))
    write = False
    engine(x)
    write = True
    return refusal(lambda: engine(x), "0.weight", "write in place")


def test_a_write_to_a_sharded_parameter_inside_a_pass_raises(on_ranks):
    assert on_ranks(2, writes_inside_a_pass) == [None, None]


# -- writes -----------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
    "mul_": lambda p: p.mul_(0.5),
    "data clamp_": lambda p: p.data.clamp_(-0.05, 0.05),
    "data assigned": lambda p: setattr(p, "data", p.data * 0.5),
    "fill_ a part": lambda p: p[0].fill_(0.25),
    "copied from numpy": lambda p: p.copy_(torch.from_numpy(0.5 * p.detach().numpy().copy())),
}


def writes(plan: str, way: str) -> str | None:
    both = Beside(plan)
    for _ in range(3):
        both.step()
        with torch.no_grad():
            for p in (*both.engine.module.parameters(), *both.plain.parameters()):
                WRITES[way](p)
    both.step()
    return both.difference()


@covering(plan=("2 offload", "2", "3 persistent", "0", "1"), way=WRITES, strength=1)
def test_writes_to_unsharded_parameters_equal_plain_torch(on_ranks, plan, way):
    assert on_ranks(2, writes, plan, way) == [None, None]


def used_by_reference(plan: str, overlap: bool) -> str | None:
    """The program keeps the Parameters in lists, and reads and writes them right after each step."""
    both = Beside(plan, zero_optimization={"overlap_comm": overlap})
    ours, plain = list(both.engine.module.parameters()), list(both.plain.parameters())
    averages = [[p.detach().clone() for p in some] for some in (ours, plain)]
    for _ in range(4):
        both.step()
        with torch.no_grad():
            for average, some in zip(averages, (ours, plain), strict=True):
                torch._foreach_lerp_(average, some, 0.5)
            for some in (ours, plain):
                torch._foreach_mul_(some, 0.75)
    for p, one, other in zip(plain, *averages, strict=True):
        if not torch.allclose(one.cpu(), other.cpu(), atol=1e-6):
            return f"an average of shape {tuple(p.shape)} has read values from before a step"
    both.step()
    return both.difference()


@pytest.mark.parametrize(
    ("plan", "overlap"), [("2", True), ("2 offload", True), ("3 persistent", True), more("1", True), more("0", False)]
)
def test_parameters_that_the_program_keeps_are_new_after_a_step(on_ranks, plan, overlap):
    assert on_ranks(2, used_by_reference, plan, overlap) == [None, None]


def writes_in_16_bits(plan: str, dtype: str, optimizer: str, honour: bool) -> str | None:
    """At rate 0 a step leaves what was written."""
    params = {"lr": 0.0, "weight_decay": 0.0} if optimizer != "SGD" else {"lr": 0.0}
    section = {"type": optimizer, "params": params}
    engine = start(
        net(), settings(plan, optimizer=section, onefold={"honour_writes": honour}, **precision(dtype)),
    )  # fmt: skip
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for step in range(2):
        for index, p in enumerate(engine.module.parameters()):
            p.data.view(-1)[::3] = 0.125 * (index + 1 + step)
        wanted = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        x, y = data(step, kind)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        found = dict(engine.module.named_parameters())
        kept = all(torch.equal(found[name], wanted[name]) for name in wanted)
        if kept is not honour:
            return f"step {step}: written values {'lost' if honour else 'kept'}"
    return None


@covering(plan=WHOLE, dtype=("bf16", "fp16"), strength=1)
def test_writes_in_16_bits_reach_the_master(on_ranks, plan, dtype):
    assert on_ranks(2, writes_in_16_bits, plan, dtype, "AdamW", True) == [None, None]


def test_writes_reach_the_master_of_any_optimizer(on_ranks):
    assert on_ranks(2, writes_in_16_bits, "1", "bf16", "NAdam", True) == [None, None]


def test_the_search_for_writes_can_be_turned_off(on_ranks):
    assert on_ranks(2, writes_in_16_bits, "1", "bf16", "SGD", False) == [None, None]


def written_on_one_rank(plan: str, how: str) -> str | None:
    engine = start(net(), settings(plan))
    x, y = data(0)
    for step in range(2):
        engine.backward(F.mse_loss(engine(x), y))
        with torch.no_grad():
            if step and (rank() == 1 or how == "all"):
                engine.module[0].weight.mul_(0.5)
        if step and how == "one":
            return refusal(engine.step, "rank 1", "written", "0.weight")
        engine.step()
    engine.module.load_state_dict(engine.module_state_dict())
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()
    return None


@covering(plan=("0", "2", "3 persistent"), how=("one", "all"), strength=1)
def test_a_write_on_one_rank_alone_raises(on_ranks, plan, how):
    assert on_ranks(2, written_on_one_rank, plan, how) == [None, None]


def part_of_a_line_written() -> str | None:
    """Beside what was written, masters keep the digits that 16 bits do not show."""
    engine = start(net(), settings("1", **precision("bf16")))
    for step in range(3):
        x, y = data(step, torch.bfloat16)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    weight = engine.module[0].weight
    before = onefold.utils.safe_get_full_fp32_param(weight)
    weight.data[0] = 0.125
    engine.optimizer.param_groups[0].update(lr=0.0)
    x, y = data(9, torch.bfloat16)
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()
    after = onefold.utils.safe_get_full_fp32_param(weight)
    if not torch.equal(after[0], torch.full_like(after[0], 0.125)):
        return "what was written is lost"
    if torch.equal(before, before.bfloat16().float()):
        return "masters have no digits beyond 16 bits: this shows nothing"
    return None if torch.equal(after[1:], before[1:]) else "masters beside it were rounded"


def test_a_write_to_part_of_a_line_leaves_other_masters_alone(on_ranks):
    assert on_ranks(2, part_of_a_line_written) == [None, None]


def untouched(plan: str, dtype: str) -> bool:
    """Comparing changes no bit where nobody writes."""
    found = []
    for honour in (True, False):
        engine = start(net(), settings(plan, onefold={"honour_writes": honour}, **precision(dtype)))
        for step in range(3):
            x, y = data(step, torch.bfloat16)
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
        found.append([onefold.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("plan", ["1", "2 offload"])
def test_looking_for_writes_moves_no_bit(on_ranks, plan):
    assert on_ranks(2, untouched, plan, "bf16") == [True, True]


# -- readers of master weights between two steps -----------------------------------------------------------------


def master_of(engine: Any, name: str) -> torch.Tensor:
    return onefold.utils.safe_get_full_fp32_param(engine.module.get_parameter(name))


def loaded_master(saved: Any, folder: str, config: dict[str, Any], background: bool) -> torch.Tensor:
    saved.save_checkpoint(folder, tag=f"background {background}", background=background)
    saved.module[0].weight.data[0] = 7.0  # later than the save
    saved.wait_for_checkpoint()
    engine = start(net(), config)
    engine.load_checkpoint(folder, tag=f"background {background}")
    return master_of(engine, "0.weight")


def master_after_partial_load(engine: Any, folder: str) -> torch.Tensor:
    """Load a checkpoint of another part of the model."""
    torch.manual_seed(1)
    other = start(nn.Sequential(nn.Linear(16, 32)).requires_grad_(True), config(0, optimizer=SGD))
    other.save_checkpoint(folder, tag="part")
    engine.load_checkpoint(folder, tag="part", load_module_strict=False, load_optimizer_states=False)
    return master_of(engine, "3.weight")


def master_after_setting_another(engine: Any) -> torch.Tensor:
    bias = engine.module[0].bias
    onefold.utils.safe_set_full_fp32_param(bias, torch.zeros_like(bias, dtype=torch.float32))
    return master_of(engine, "0.weight")


def readers_of_masters(plan: str, dtype: str, tier: str, folder: str) -> str | None:
    """Write a row, read the master by one way, and compare: the row is there, and all others keep their low bits."""
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/nvme", "pin_memory": False}}
    stage, zero = PLANS[plan]
    settings = config(stage, zero_optimization={**zero, **(offload if tier == "nvme" else {})}, optimizer=SGD,
                      **precision(dtype))  # fmt: skip
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    readers: dict[str, tuple[str, Callable[[Any], torch.Tensor]]] = {
        "safe_get_full_fp32_param": ("0.weight", lambda engine: master_of(engine, "0.weight")),
        "save": ("0.weight", lambda engine: loaded_master(engine, folder, settings, False)),
        "background save": ("0.weight", lambda engine: loaded_master(engine, folder, settings, True)),
        "safe_set of another": ("0.weight", master_after_setting_another),
        "partial load": ("3.weight", lambda engine: master_after_partial_load(engine, folder)),
    }
    engine = start(net(), settings)
    for number, (name, (parameter, reader)) in enumerate(readers.items()):
        x, y = data(number, kind)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        expected = master_of(engine, parameter).clone()
        expected[0] = value = 0.125 * (number + 1)
        engine.module.get_parameter(parameter).data[0] = value
        found = reader(engine)
        if not torch.equal(found, expected):
            rows = (found != expected).any(1).nonzero().flatten().tolist()
            return f"{name}: rows {rows} of {parameter} are not what was written or stepped"
    return None


@pytest.mark.parametrize(
    ("plan", "dtype", "tier"),
    [
        ("0", "fp16", "device"),
        ("2", "bf16", "device"),
        ("3 persistent", "bf16", "device"),
        ("2 offload", "fp32", "host"),
        ("1", "bf16", "nvme"),
        more("1", "bf16", "device"),
        more("2 offload", "bf16", "host"),
        more("3 persistent", "fp32", "nvme"),
    ],
)
def test_every_reader_of_masters_sees_in_place_writes(on_ranks, tmp_path, plan, dtype, tier):
    assert on_ranks(2, readers_of_masters, plan, dtype, tier, str(tmp_path)) == [None, None]


def write_during_a_delayed_step() -> str | None:
    engine = start(net(), settings("2 offload", onefold={"delayed_host_step": True}))

    def step(number: int) -> None:
        x, y = data(number)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()

    step(0)
    with GatheredParameters([engine.module[0].weight], modifier_rank=0):
        engine.module[0].weight.data.mul_(0.5)
    step(1)
    engine.module[0].weight.data.mul_(0.5)
    x, y = data(2)
    engine.backward(F.mse_loss(engine(x), y))
    return refusal(engine.step, "written in place", "delayed_host_step", "GatheredParameters")


def test_a_write_that_a_delayed_step_would_replace_raises(on_ranks):
    assert on_ranks(1, write_during_a_delayed_step) == [None]


# -- what a user keeps ------------------------------------------------------------------------------------------


def through_a_queue(weight: torch.Tensor) -> torch.Tensor:
    queue = torch.multiprocessing.SimpleQueue()
    queue.put(weight)
    return queue.get()


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda p: p.detach().numpy(),
    "dlpack": lambda p: numpy.from_dlpack(p.detach()),
    "torch dlpack": lambda p: torch.from_dlpack(p.detach()),
    "view": lambda p: p.detach(),
    "transposed": lambda p: p.detach().t(),
    "row": lambda p: p.data[1],
    "shared": lambda p: p.detach().share_memory_(),
    "queue": lambda p: through_a_queue(p.detach()),
}


def kept_from_gathered(way: str) -> str | None:
    both = Beside("3 nothing kept")
    both.step()
    weight = both.engine.module[0].weight
    with GatheredParameters([weight]):
        kept = KEEPS[way](weight)
        copied = copy.deepcopy(kept) if not isinstance(kept, numpy.ndarray) else kept.copy()
    for _ in range(2):
        both.step()
    if not (kept == copied).all():
        return f"what was kept has become {kept}"
    return both.difference()


@pytest.mark.parametrize("way", list(KEEPS))
def test_what_was_kept_of_gathered_parameters_stays_valid(on_ranks, way):
    assert on_ranks(2, kept_from_gathered, way) == [None, None]


def kept_from_a_hook(way: str, training: bool) -> str | None:
    both = Beside("3 nothing kept")
    kept: list[Any] = []
    if training or way != "numpy":
        both.engine.module[0].register_forward_hook(lambda module, args, out: kept.append(KEEPS[way](module.weight)))
    if training:
        both.step()
    else:
        with torch.no_grad():
            both.engine(data(0)[0])
    copies = [value.copy() if isinstance(value, numpy.ndarray) else value.clone() for value in kept]
    both.step()
    both.step()
    if any(not (value == other).all() for value, other in zip(kept, copies, strict=False)):
        return "what was kept has changed"
    return both.difference()


@pytest.mark.parametrize(
    ("way", "training"), [("numpy", True), ("shared", True), ("queue", True), ("dlpack", False), ("view", False)]
)
def test_what_was_kept_inside_a_forward_stays_valid(on_ranks, way, training):
    assert on_ranks(2, kept_from_a_hook, way, training) == [None, None]


# -- gradients --------------------------------------------------------------------------------------------------

DROPS: dict[str, Callable[[onefold.Engine], Any]] = {
    "model": lambda engine: engine.module.zero_grad(),
    "model, to zero": lambda engine: engine.module.zero_grad(set_to_none=False),
    "each": lambda engine: [setattr(p, "grad", None) for p in engine.module.parameters()],
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "another optimizer": lambda engine: torch.optim.SGD(engine.module.parameters()).zero_grad(),
}


def dropped(plan: str, way: str) -> str | None:
    both = Beside(plan)
    both.step()
    x, y = data(50)
    F.mse_loss(both.engine(x), y).backward()
    DROPS[way](both.engine)
    if any(p.grad is not None for p in both.engine.module.parameters()) and way != "model, to zero":
        return "a gradient is still there"
    both.step()
    return both.difference()


@covering(plan=("3 nothing kept", "1", "0", "2", "2 offload", "3 offload"), way=DROPS, strength=1)
def test_gradients_are_dropped_however_it_is_asked_for(on_ranks, plan, way):
    assert on_ranks(2, dropped, plan, way) == [None, None]


def partly_dropped(plan: str) -> str | None:
    """A submodule's `zero_grad` drops its own gradients, inside an accumulation window too."""
    model = net()
    plain = copy.deepcopy(model).to(local_device())
    engine = start(model, settings(plan, gradient_accumulation_steps=2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = data(step)
        engine.backward(F.mse_loss(engine(x), y))
        (F.mse_loss(plain(x), y) / 2).backward()
        if step in (0, 3):
            engine.module[2].zero_grad()
            plain[2].zero_grad(set_to_none=False)
        engine.step()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    found = weights_of(engine.module)
    off = {name: float((found[name].cpu() - tensor.cpu()).abs().max()) for name, tensor in plain.state_dict().items()}
    return None if max(off.values()) < 1e-6 else f"off by {off}"


@covering(plan=("1", "3", more("0"), more("2"), more("2 offload"), more("3 offload")))
def test_a_submodule_drops_its_own_gradients(on_ranks, plan):
    assert on_ranks(2, partly_dropped, plan) == [None, None]


def gradients_read(plan: str) -> str | None:
    engine = start(net(), settings(plan))
    x, y = data(0)
    engine.backward(F.mse_loss(engine(x), y))
    weight = engine.module[0].weight
    words = ("0.weight", "gradient_clipping", "safe_get_full_grad")
    reads: dict[str, Callable[[], Any]] = {
        "clip": lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3),
        "norm": lambda: weight.grad.norm(),
        "scaled": lambda: weight.grad.mul_(0.5),
        "copied": lambda: weight.grad.clone(),
    }
    for name, read in reads.items():
        problem = refusal(read, *words)
        if problem:
            return f"{name}: {problem}"
    if weight.grad is None or weight.grad.shape != (32, 16):
        return f"grad is {weight.grad!r}"
    problem = refusal(lambda: setattr(weight, "grad", torch.zeros(32, 16)), "0.weight", "safe_set_full_grad")
    engine.step()
    return problem or (None if weight.grad is None else "a gradient after the step")


@covering(plan=("2", "3", more("0"), more("1")))
def test_reading_a_sharded_gradient_says_what_to_call(on_ranks, plan):
    assert on_ranks(2, gradients_read, plan) == [None, None]


def clipped_by_hand(plan: str) -> str | None:
    model = net()
    plain = copy.deepcopy(model).to(local_device())
    engine = start(model, settings(plan))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = data(step)
        engine.backward(F.mse_loss(engine(x), y))
        F.mse_loss(plain(x), y).backward()
        norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.05)) for m in (engine.module, plain)]
        if norms[0] != pytest.approx(norms[1], rel=1e-6):
            return f"step {step}: norms {norms}"
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    found = weights_of(engine.module)
    off = max(float((found[name].cpu() - tensor.cpu()).abs().max()) for name, tensor in plain.state_dict().items())
    return None if off < 1e-6 else f"off by {off}"


@pytest.mark.parametrize("plan", ["0", "2", "3", "2 offload"])
def test_one_rank_clips_by_hand_as_plain_torch(on_ranks, plan):
    assert on_ranks(1, clipped_by_hand, plan) == [None]


def scaled_gradient() -> str | None:
    """Clipped to a norm of 1 it would count as one of 1 / scale."""
    engine = start(net(), settings("2", **precision("fp16")))
    x, y = data(0, torch.float16)
    engine.backward(F.mse_loss(engine(x), y))
    found = refusal(
        lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0), "loss scale", "gradient_clipping"
    )
    engine.module.zero_grad()
    return found


def test_a_scaled_gradient_is_not_clipped_by_hand(on_ranks):
    assert on_ranks(1, scaled_gradient) == [None]


# -- changes after initialize -----------------------------------------------------------------------------------


def frozen_between(plan: str, optimizer: str) -> str | None:
    model = net(width=64)  # wide enough that shards of the second rank hold parameters too
    plain = copy.deepcopy(model).to(local_device())
    kinds = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "NAdam": torch.optim.NAdam}
    params: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if optimizer == "SGD" else {})
    engine = start(model, settings(plan, optimizer={"type": optimizer, "params": params}))
    reference = kinds[optimizer](plain.parameters(), **params)
    for step in range(5):
        for found in (engine.module, plain):
            found[0].requires_grad_(step < 2)
            found[2][0].bias.requires_grad = step != 3
        x, y = data(step)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        F.mse_loss(plain(x), y).backward()
        reference.step()
        reference.zero_grad()
    found, expected = weights_of(engine.module), plain.state_dict()
    # Adam counts the steps of a parameter that is frozen for a while too: what was frozen to the end must agree.
    names = ["0.weight", "0.bias"] if optimizer != "SGD" else list(expected)
    off = {name: float((found[name].cpu() - expected[name].cpu()).abs().max()) for name in names}
    return None if max(off.values()) < 1e-6 else f"off by {off}"


@covering(
    plan=("3", "1", "2 offload", more("0"), more("2"), more("3 offload")),
    optimizer=("SGD", "AdamW", "NAdam"),
    strength=1,
)
def test_a_frozen_parameter_stops_moving(on_ranks, plan, optimizer):
    assert on_ranks(2, frozen_between, plan, optimizer) == [None, None]


def frozen_on_one_rank(plan: str) -> str | None:
    engine = start(net(), settings(plan))
    engine.module[0].requires_grad_(rank() == 0)
    x, y = data(0)
    engine.backward(F.mse_loss(engine(x), y))
    return refusal(engine.step, "frozen", "rank")


@pytest.mark.parametrize("plan", ["2", "3"])
def test_ranks_that_freeze_different_parameters_raise(on_ranks, plan):
    assert on_ranks(2, frozen_on_one_rank, plan) == [None, None]


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tie(model: Any) -> None:
    model.layers[1].weight = model.layers[0].weight


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "added": (lambda model: model.layers.append(nn.Linear(16, 16)), "layers.2.weight was added"),
    "inserted": (lambda model: model.layers.insert(0, nn.Linear(16, 16)), "was replaced"),
    "replaced": (lambda model: setattr(model, "head", nn.Linear(16, 4)), "head.weight was replaced"),
    "parameter": (
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(4, 16))),
        "head.weight was replaced",
    ),
    "registered": (lambda model: model.register_parameter("more", nn.Parameter(torch.zeros(4))), "more was added"),
    "tied": (tie, "layers.1.weight is now tied to layers.0.weight"),
    "cast": (lambda model: model.layers[0].double(), "float64"),
    "moved": (lambda model: model.to("meta"), ""),
    "given": (lambda model: setattr(model.head.weight, "data", torch.zeros(5, 16)), "(5, 16)"),
}


def changed_after(plan: str, how: str, at_step: bool) -> str | None:
    engine = start(Later(), settings(plan))
    x, y = data(0)
    engine.backward(F.mse_loss(engine(x), y))
    change, words = CHANGES[how]

    def work() -> None:
        change(engine.module)
        if at_step:
            engine.step()
        engine(x)

    return refusal(work, words)


@covering(plan=("3", "2"), how=CHANGES, strength=1)
def test_a_model_that_is_changed_after_initialize_is_refused_by_name(on_ranks, plan, how):
    assert on_ranks(2, changed_after, plan, how, False) == [None, None]


@pytest.mark.parametrize("how", ["added", "tied"])
def test_a_step_notices_a_changed_model(on_ranks, how):
    assert on_ranks(2, changed_after, "2", how, True) == [None, None]


def harmless_changes(plan: str) -> str | None:
    both = Beside(plan)
    for model in (both.engine.module, both.plain):
        model.register_parameter("kept", nn.Parameter(torch.zeros(3), requires_grad=False))
        model.register_buffer("count", torch.zeros((), device=local_device()))
    both.step()
    both.engine.module.to(torch.float32)
    weights = {name: p.detach() * 1.0 for name, p in both.plain.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(both.engine.module, weights, (data(0)[0],))
    both.step()
    return both.difference()


@pytest.mark.parametrize("plan", ["2", "3"])
def test_changes_that_train_nothing_are_let_through(on_ranks, plan):
    assert on_ranks(2, harmless_changes, plan) == [None, None]


# -- what can be trained ----------------------------------------------------------------------------------------


class Tagged(nn.Parameter):
    pass


class Meaningful(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def tagged_net() -> nn.Module:
    model = net()
    model[0].weight = Tagged(model[0].weight.detach().clone())
    return model


def subclass(plan: str) -> str | None:
    both = Beside(plan, tagged_net)
    for _ in range(2):
        both.step()
    if type(both.engine.module[0].weight).__name__ != "Tagged" or not isinstance(both.engine.module[0].weight, Tagged):
        return f"its class is {type(both.engine.module[0].weight)}"
    if problem := both.difference():
        return problem
    model = both.engine.module
    both.engine.destroy()
    onefold.zero.gather_distributed_parameters(model)
    return None if type(model[0].weight) is Tagged else f"afterwards its class is {type(model[0].weight)}"


@covering(plan=("2", "3", more("0"), more("1"), more("3 offload")))
def test_a_subclass_of_parameter_is_trained(on_ranks, plan):
    assert on_ranks(2, subclass, plan) == [None, None]


def untrainable(what: str) -> str | None:
    model: Any = net()
    if what == "complex":
        model.w = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        words = ["Parameter w", "view_as_complex"]
    elif what == "own meaning":
        model[0].weight = Meaningful(model[0].weight.detach().clone())
        words = ["0.weight", "Meaningful"]
    elif what == "same memory":
        model.append(nn.Linear(4, 4))
        model.append(nn.Linear(4, 4))
        model[-1].weight.data = model[-2].weight.data
        words = ["4.weight", "5.weight", "b.weight = a.weight"]
    elif what == "overlapping":
        line = torch.zeros(40)
        model.a, model.b = nn.Parameter(line[:20]), nn.Parameter(line[10:30])
        words = ["Parameters a and b"]
    elif what == "inside a frozen one":
        line = torch.zeros(40)
        model.a, model.b, model.c = (nn.Parameter(part) for part in (line, line[5:15], line[20:30]))
        model.a.requires_grad, model.b.requires_grad = False, False
        words = ["Parameters a and c"]
    elif what == "rows and columns":
        matrix = torch.zeros(4, 4)
        model.a, model.b = nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[2:])
        words = ["Parameters a and b"]
    else:
        model[2] = torch.jit.script(model[2])
        words = ["Module 2", "ScriptModule", "torch.compile"]
    return refusal(lambda: start(model, settings("2")), *words)


@pytest.mark.parametrize(
    "what",
    ["complex", "own meaning", "same memory", "overlapping", "inside a frozen one", "rows and columns", "scripted"],
)
def test_what_cannot_be_trained_is_refused_by_name(on_ranks, what):
    assert on_ranks(1, untrainable, what) == [None]


def neighbours() -> str | None:
    """Parameters side by side in one storage are apart; frozen ones may even share memory."""

    def make() -> nn.Module:
        model: Any = net()
        line = torch.cat([p.detach().flatten() for p in model[0].parameters()])
        model[0].weight = nn.Parameter(line[:512].view(32, 16))
        model[0].bias = nn.Parameter(line[512:])
        shared = torch.ones(3)
        model.one, model.two = (nn.Parameter(shared, requires_grad=False) for _ in range(2))
        return model

    both = Beside("2", make)
    both.step()
    return both.difference()


def test_parameters_side_by_side_in_one_storage_are_trained(on_ranks):
    assert on_ranks(2, neighbours) == [None, None]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.none = nn.Linear(16, 4), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.none.sum()


def under_init(what: str) -> str | None:
    if what == "same memory":
        with onefold.zero.Init():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            return refusal(lambda: setattr(model[1].weight, "data", model[0].weight.data), "b.weight = a.weight")
    if what == "forward":
        with onefold.zero.Init():
            model = net()
        return refusal(lambda: model(data(0)[0]), "weight", "GatheredParameters")
    both = Beside("3 nothing kept", Odd)
    with onefold.zero.Init(config_dict_or_path=settings("3 nothing kept")):
        model = Odd()
    both.engine = start(model, settings("3 nothing kept"))
    both.step()
    return both.difference() or (None if tuple(both.plain.none.shape) == (0, 4) else "another shape")


@pytest.mark.parametrize("what", ["same memory", "forward", "empty"])
def test_odd_models_under_init(on_ranks, what):
    assert on_ranks(2, under_init, what) == [None, None]


# -- copies and pickles -----------------------------------------------------------------------------------------


def copied_and_pickled(plan: str) -> str | None:
    both = Beside(plan)
    both.step()
    model = both.engine.module
    with GatheredParameters(list(model.parameters())):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        torch.save([model[0].weight, model[0].bias], io.BytesIO())
        copies = [copy.deepcopy(model), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)]
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = data(9)
    for found in copies:
        if any(type(p) is not nn.Parameter for p in found.parameters()):
            return f"classes {[type(p) for p in found.parameters()]}"
        if any(not torch.equal(p, expected[name]) for name, p in found.named_parameters()):
            return "a copy has other values"
        F.mse_loss(found(x), y).backward()
        torch.optim.SGD(found.parameters(), lr=0.1).step()
    both.step()
    return both.difference()


@pytest.mark.parametrize("plan", ["2", "3 nothing kept"])
def test_a_model_can_be_copied_and_pickled_while_it_is_whole(on_ranks, plan):
    assert on_ranks(2, copied_and_pickled, plan) == [None, None]


def classes_after_the_engine(plan: str) -> str | None:
    model = net()
    engine = start(model, settings(plan))
    x, y = data(0)
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()
    engine.destroy()
    onefold.zero.gather_distributed_parameters(model)
    if any(type(p) is not nn.Parameter for p in model.parameters()):
        return f"classes {[type(p) for p in model.parameters()]}"
    F.mse_loss(model(x), y).backward()
    return None if all(p.grad is not None for p in model.parameters()) else "no gradients"


@pytest.mark.parametrize("plan", ["1", "3"])
def test_parameters_are_plain_again_without_an_engine(on_ranks, plan):
    assert on_ranks(2, classes_after_the_engine, plan) == [None, None]


# -- loans that fail --------------------------------------------------------------------------------------------


def failed_loan() -> str | None:
    both = Beside("3 nothing kept")
    both.step()
    homes = [handle_of(p) for p in (both.engine.module[0].weight, both.engine.module[3].weight)]

    def fail() -> None:
        raise RuntimeError("no memory")

    homes[1].acquire = fail
    problem = refusal(lambda: GatheredParameters(list(both.engine.module.parameters())).__enter__(), "no memory")
    del homes[1].acquire
    if problem or unsharded_units(both.engine):
        return problem or f"still lent: {unsharded_units(both.engine)}"
    both.step()
    return both.difference()


def test_a_loan_that_fails_half_way_is_undone(on_ranks):
    assert on_ranks(2, failed_loan) == [None, None]


def self_referencing() -> str | None:
    """Attributes of modules that hold themselves, or a vocabulary, are no outputs."""

    def make() -> nn.Module:
        model: Any = net()
        model.loop = {"name": "loop"}
        model.loop["itself"] = model.loop
        model[0].vocabulary = {f"word {number}": number for number in range(10_000)}
        return model

    both = Beside("3 nothing kept", make)
    for _ in range(2):
        both.step()
    return both.difference()


def test_attributes_that_hold_themselves_are_no_outputs(on_ranks):
    assert on_ranks(2, self_referencing) == [None, None]


# -- buffers ----------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.frequencies.to(x.dtype)


class OwnNorm(nn.BatchNorm1d):
    pass


class OwnLinear(nn.Linear):
    pass


BUFFERED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(16),
    "own batch norm": lambda: OwnNorm(16),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
    "old spectral norm": lambda: nn.utils.spectral_norm(OwnLinear(16, 16)),
}


def buffers(name: str, plan: str) -> str | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), BUFFERED[name](), Rotary(), nn.Linear(16, 4))
    plain = copy.deepcopy(model).to(local_device())
    frequencies = plain[2].frequencies
    plain = plain.to(torch.bfloat16)
    plain[2].frequencies = frequencies
    engine = start(model, settings(plan, **precision("bf16")))
    for step in range(2):
        x, _ = data(step, torch.bfloat16)
        out, expected = engine(x), plain(x)
        if step == 0 and not torch.equal(out, expected):
            return f"outputs differ by {(out - expected).abs().max()}"
        engine.backward(out.float().pow(2).mean())
        engine.step()
    found = {key: value.dtype for key, value in engine.module.named_buffers()}
    wanted = {key: value.dtype for key, value in plain.named_buffers()}
    return None if found == wanted else f"{found}, module.to(bf16) has {wanted}"


@covering(plan=("3", "1"), name=BUFFERED, strength=1)
def test_buffers_of_torchs_layers_follow_the_parameters(on_ranks, name, plan):
    assert on_ranks(2, buffers, name, plan) == [None, None]


# -- hooks of the user's on gradients ---------------------------------------------------------------------------


def _dropped(parameter: Any) -> None:
    parameter.grad = None


def _deleted(parameter: Any) -> None:
    del parameter.grad


def _halved(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


def hooked(plan: str, way: Callable[[Any], None], after: bool, names: list[str]) -> str | None:
    """A hook that runs when a gradient has been accumulated, in every step but the last."""
    active = [True]

    def hook(parameter: Any) -> None:
        if active[0]:
            way(parameter)

    def register(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.register_post_accumulate_grad_hook(hook)

    def make() -> nn.Module:
        model = net()
        if not after:
            register(model)
        return model

    both = Beside(plan, make)
    register(both.plain)  # a copy has no hooks
    if after:
        register(both.engine.module)
    both.step()
    both.step()
    active[0] = False
    both.step()
    return both.difference()


@pytest.mark.parametrize("plan", ["1", "3", *(more(plan) for plan in PLANS if plan not in ("1", "3"))])
@pytest.mark.parametrize("after", [False, True], ids=["before initialize", "after initialize"])
@pytest.mark.parametrize("way", [_dropped, more(_deleted)])
def test_a_hook_may_drop_a_gradient_inside_a_backward(on_ranks, plan, after, way):
    """Those of the last layer land first, when nothing else is there; the first layer's are reduced at once."""
    for names in (["3.bias"], ["0.weight", "2.0.bias"]):
        assert on_ranks(2, hooked, plan, way, after, names) == [None, None]


@pytest.mark.parametrize("plan", ["2", "3"])
def test_a_hook_may_replace_a_gradient_before_it_is_taken(on_ranks, plan):
    assert on_ranks(2, hooked, plan, _halved, False, ["0.weight", "3.bias"]) == [None, None]


def hook_raises(plan: str, bare: bool) -> str | None:
    raising = [False]

    def hook(parameter: Any) -> None:
        if raising[0]:
            raise KeyError("mine")

    def make() -> nn.Module:
        model: Any = net()
        model[0].weight.register_post_accumulate_grad_hook(hook)
        return model

    both = Beside(plan, make)
    both.step()
    raising[0] = True
    x, y = data(9)
    loss = F.mse_loss(both.engine(x), y)
    try:
        if bare:
            loss.backward()
        else:
            both.engine.backward(loss)
    except KeyError:
        raising[0] = False
    both.step()
    return "no error" if raising[0] else both.difference()


@covering(plan=("2", "3"), bare=(False, True), strength=1)
def test_a_hook_that_raises_leaves_no_gradient_behind(on_ranks, plan, bare):
    assert on_ranks(2, hook_raises, plan, bare) == [None, None]


def dropped_on_one_rank(plan: str) -> str | None:
    engine: Any = start(net(), settings(plan))
    x, y = data(0)
    engine.backward(F.mse_loss(engine(x), y))
    if rank() == 1:
        engine.module[0].weight.grad = None
    return refusal(engine.step, "rank 1", "dropped gradients", "0.weight", "none")


@covering(plan=("2", "3", more("0")))
def test_ranks_that_drop_different_gradients_raise(on_ranks, plan):
    assert on_ranks(2, dropped_on_one_rank, plan) == [None, None]


# -- more of the same -------------------------------------------------------------------------------------------


def permuted() -> str | None:
    """The same values in other places, through `.data`: no counter and no sum shows it."""
    engine: Any = start(net(), settings("3"))

    def write() -> None:
        with GatheredParameters(engine.module.parameters()):
            weight = engine.module[0].weight
            if torch.distributed.get_rank() == 1:
                weight.data.copy_(weight.data.flip(0))

    return refusal(write, "0.weight", "modifier_rank")


def test_values_that_change_places_are_seen_as_a_write(on_ranks):
    assert on_ranks(2, permuted) == [None, None]


class Columns(nn.Module):
    """Parameters that lie between each other in one matrix, and share no element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        matrix = 0.1 * torch.randn(4, 32)
        self.one, self.two = nn.Parameter(matrix[:, :16]), nn.Parameter(matrix[:, 16:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one.t() + torch.tanh(x @ self.two.t())


def columns() -> str | None:
    both = Beside("2", Columns)
    both.step()
    return both.difference()


def test_columns_of_one_matrix_are_trained(on_ranks):
    assert on_ranks(2, columns) == [None, None]


def shared_by_two_engines(plan: str) -> str | None:
    trunk = nn.Linear(16, 16).requires_grad_(False)
    models = [nn.Sequential(trunk, nn.Linear(16, 4)) for _ in range(2)]
    engines = [start(model, settings(plan)) for model in models]
    x, y = data(0)
    for _ in range(2):
        for engine in engines:
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
    for model in models:
        with GatheredParameters(model.parameters()):
            if model.state_dict()["0.weight"].shape != (16, 16):
                return "a state dict without values"
    return None


def test_two_engines_share_a_frozen_module(on_ranks):
    assert on_ranks(2, shared_by_two_engines, "3") == [None, None]


def unfrozen_later(plan: str) -> str | None:
    engine: Any = start(net(), settings(plan))
    engine.module.append(nn.Linear(4, 4).requires_grad_(False))
    x, y = data(0)
    for _ in range(2):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    engine.module[4].requires_grad_(True)
    return refusal(lambda: engine(x), "4.weight was added and requires a gradient now")


@covering(plan=("2", "3"))
def test_a_layer_that_is_added_frozen_and_unfrozen_later_is_refused(on_ranks, plan):
    assert on_ranks(2, unfrozen_later, plan) == [None, None]


def _jacobian(model: nn.Module) -> torch.Tensor:
    inputs = torch.ones(2, 16, device=local_device())
    return torch.func.jacrev(model)(inputs).pow(2).sum()


def _hessian(model: nn.Module) -> torch.Tensor:
    inputs = torch.ones(16, device=local_device())
    return torch.func.hessian(lambda x: model(x).pow(2).sum())(inputs).sum()


def _directional(model: nn.Module) -> torch.Tensor:
    def penalised(x: torch.Tensor) -> torch.Tensor:
        return model(x) * (1 + sum(p.pow(2).sum() for p in model.parameters()))

    inputs = torch.ones(4, 16, device=local_device())
    return torch.func.jvp(penalised, (inputs,), (inputs,))[1].pow(2).sum()


def _mapped(model: nn.Module) -> torch.Tensor:
    return torch.func.vmap(model)(torch.ones(3, 4, 16, device=local_device())).pow(2).sum()


def transformed(plan: str, way: Callable[[nn.Module], torch.Tensor]) -> str | None:
    both = Beside(plan)
    for _ in range(3):
        both.step(lambda model, out, y: F.mse_loss(out, y) + 1e-3 * way(model))
    return both.difference(1e-5)


@covering(plan=("3", "2", "3 nothing kept"), way=(_jacobian, _hessian, _directional, _mapped), strength=1)
def test_a_model_may_be_transformed_by_torch_func(on_ranks, plan, way):
    assert on_ranks(2, transformed, plan, way) == [None, None]
