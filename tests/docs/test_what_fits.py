"""The page `what fits`: its formulas agree with the planner, and its script computes what Python does."""

from __future__ import annotations

import inspect
import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields, replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))  # the generator is not installed

import formulas
from case import Case, PerElement
from models import more, one_in
from planned_states import config_of as setting_of
from planned_states import planned_states
from to_javascript import UntranslatableError, translate, translate_module
from what_fits import (
    CHOICES,
    DEFAULTS,
    GPU_KINDS,
    HOST_KINDS,
    NVME_KINDS,
    SHAPES,
    machines,
    page,
    planned_table,
    settings,
)

import onefold
from benchmarks.shapes import Block, Decoder, GatedMLP
from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.plan import Tier, assign_tiers, count_bytes, make_plan
from onefold.tools.estimate.dry_run import META, dry_run
from onefold.tools.estimate.forecast import FRAGMENTATION, PROCESS, forecast
from onefold.tools.estimate.machines import GB, Gpu, Machine, find_machine
from onefold.tools.estimate.models import ModelSource, find_model
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting

PAGE = Path(__file__).parents[2] / "docs" / "what-fits.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page in")


def case_of(values: dict[str, Any]) -> Case:
    """What the page's script does with the values of its controls."""
    direct = {field.name: values[field.name] for field in fields(Case) if field.name in values}
    memory = {name: values[name] * GB for name in ("gpu_memory", "host_memory", "nvme")}
    return Case(**{**direct, **memory, **planned_states(values)}, accumulates=values["accumulation"] > 1)


# -- the translator ----------------------------------------------------------------------------------------------------

EACH = [
    ("def f(a, b):\n    return a + b * 3 - a / b", [(7, 2), (-1.5, 4)]),
    ("def f(a, b):\n    return a - (b - 1) - 2", [(7, 2)]),
    ("def f(a, b):\n    return a // b", [(7, 2), (-7, 2), (7, -2), (6, 3), (1e12 + 1, 7)]),
    ("def f(a, b):\n    return -(-a // b)", [(7, 2), (6, 3)]),
    ("def f(a, b):\n    return min(a, b, 3) + max(a, b)", [(7, 2), (1, 2)]),
    ("def f(a, b):\n    return a if a > b else b if b == 2 else -1", [(7, 2), (1, 2), (1, 3)]),
    ("def f(a, b):\n    return (1 if a <= b else 0) + (2 if a != b else 0) + (4 if a >= b else 0)", [(1, 2), (2, 2)]),
    ("def f(a, b):\n    return 1 if (a < 1 and not b < 1) or a == b else 0", [(0, 0), (0, 1), (1, 0), (5, 5)]),
    ("def f(a, b):\n    'Says so.'\n    new = a * LIMIT\n    later = new + b\n    return later", [(7, 2)]),
    ("def g(case):\n    return case + 1\ndef f(a, b):\n    return g(a) * g(g(b))", [(7, 2)]),
    ("def f(a, b):\n    kind = 'cpu' if a > b else 'none'\n    return 1 if kind == 'cpu' else 0", [(7, 2), (2, 7)]),
]

REFUSED = [
    ("def f(a):\n    return a % 2", "a % 2"),
    ("def f(a):\n    return a ** 2", "a ** 2"),
    ("def f(a):\n    return 0 < a < 2", "0 < a < 2"),
    ("def f(a):\n    return a in (1, 2)", "a in (1, 2)"),
    ("def f(a):\n    return [a]", "[a]"),
    ("def f(a):\n    return abs(a)", "abs(a)"),
    ("def f(a):\n    return min(a)", "min of one argument"),
    ("def f(a):\n    return UNKNOWN + a", "UNKNOWN"),
    ("def f(a):\n    return a.b.c", "a.b.c"),
    ("def f(a):\n    return a(1)", "a(1)"),
    ("def f(a):\n    return None", "None"),
    ("def f(a=1):\n    return a", "plain positional"),
    ("def f(*a):\n    return 1", "plain positional"),
    ("def f(a):\n    for b in a:\n        pass\n    return 1", "statement For"),
    ("def f(a):\n    if a:\n        return 1\n    return 2", "statement If"),
    ("def f(a):\n    a = 2\n    return a", "second value for a"),
    ("def f(a):\n    a += 2\n    return a", "statement AugAssign"),
    ("def f(a):\n    b = 2", "without a return"),
    ("def f(a):\n    return a\n    return 2", "statement Return"),
    ("@cache\ndef f(a):\n    return a", "decorator"),
    ("def g(a):\n    return a\ndef f(a):\n    return g(a=a)", "g(a=a)"),
]


@pytest.mark.parametrize(("source", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_has_no_translation_is_refused_by_name(source, says):
    with pytest.raises(UntranslatableError, match=r"line \d+, f: ") as error:
        translate(source, {"LIMIT": 7})
    assert says in str(error.value)


def dump_dom(path: Path, fragment: str = "") -> str:
    """What a browser makes of a page; it may take a while to start beside other tests."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [CHROMIUM, *options, "--virtual-time-budget=2000", "--dump-dom", f"{path.as_uri()}{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def evaluate(tmp_path: Path, expression: str, data: Any) -> Any:
    """The value of a JavaScript expression that may read `data`, in a browser."""
    text = json.dumps(data).replace("<", "\\u003c")
    path = tmp_path / "evaluate.html"
    path.write_text(
        f'<pre id="out"></pre><script>const data = {text}; document.getElementById("out").textContent = "at first";\n'
        f'document.getElementById("out").textContent = JSON.stringify({expression});</script>'
    )
    found = re.search(r'<pre id="out">(.*?)</pre>', dump_dom(path), re.DOTALL)
    assert found is not None
    return json.loads(unescape(found[1]))


@in_a_browser
def test_every_construct_means_the_same_in_both_languages(tmp_path):
    objects = ", ".join(translate(source, {"LIMIT": 7}) for source, _ in EACH)
    table = [inputs for _, inputs in EACH]
    found = evaluate(tmp_path, f"[{objects}].map((each, k) => data[k].map(row => each.f(...row)))", table)
    for (source, inputs), results in zip(EACH, found, strict=True):
        space: dict[str, Any] = {"LIMIT": 7}
        exec(source, space)
        assert [space["f"](*row) for row in inputs] == pytest.approx(results, rel=1e-12), source


# -- cases -------------------------------------------------------------------------------------------------------------


def random_values(rng: random.Random, **given: Any) -> dict[str, Any]:
    """Values of the page's controls."""
    heads = rng.choice([8, 16, 32])
    hidden = heads * rng.choice([64, 128])
    stage = rng.choice(CHOICES["stage"])
    offload = rng.choice(["none", "none", "cpu", "nvme"])
    values = {
        **DEFAULTS,
        **{"layers": rng.randint(2, 5), "hidden": hidden, "heads": heads},
        **{"kv_heads": heads // rng.choice([1, 2, 4]), "ffn": rng.choice([2, 3, 4]) * hidden},
        **{"vocabulary": rng.choice([16000, 32000, 50304]), "tied": rng.random() < 0.3, "gated": rng.random() < 0.7},
        **{"gpus": rng.choice([1, 2, 8]), "nodes": rng.choice([1, 1, 4])},
        **{"gpu_memory": rng.choice([24, 80]), "host_memory": rng.choice([64, 2048])},
        **{"stage": stage, "offload_optimizer": offload, "offload_param": rng.choice(["none", "cpu", "nvme"])},
        **{"precision": rng.choice(["bf16", "bf16", "fp32"]), "micro_batch": rng.choice([1, 2, 4])},
        **{"sequence_length": rng.choice([512, 2048, 8192]), "recompute": rng.random() < 0.5},
        "accumulation": rng.choice([1, 1, 4]),
        **{name: rng.choice(["fp32", *CHOICES[name]]) for name in ("state_dtype", "master_dtype")},
    }
    return {**values, **given}


class PlainMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class TiledDecoder(Decoder):
    """A decoder that computes its loss in tiles, as `onefold.tiled_loss` does for models of transformers."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return onefold.tiled_cross_entropy(self.norm(x), self.head, targets)


def model_of(case: Case) -> nn.Module:
    mlp, kind = GatedMLP if case.gated else PlainMLP, TiledDecoder if case.tiled_loss else Decoder
    with META:
        blocks = [Block(case.hidden, case.heads, case.kv_heads, mlp(case.hidden, case.ffn)) for _ in range(case.layers)]
        return kind(case.vocabulary, case.hidden, blocks, tied=case.tied, recompute=case.recompute)


def config_of(values: dict[str, Any]) -> dict[str, Any]:
    """The config that the page shows, in Python."""
    batch = {"train_micro_batch_size_per_gpu": values["micro_batch"]}
    if values["sequence_parallel"] > 1:
        batch["sequence_parallel_size"] = values["sequence_parallel"]
    if values["host_checkpoints"] and values["recompute"]:
        batch["activation_checkpointing"] = {"cpu_checkpointing": True}
    return {**setting_of(values), **batch, "gradient_accumulation_steps": values["accumulation"]}


# -- the planner -------------------------------------------------------------------------------------------------------


def planned(values: dict[str, Any]) -> tuple[Case, dict[Tier, Any]]:
    case = case_of(values)
    config, world = load_config(config_of(values)), case.gpus * case.nodes
    found = dry_run(model_of(case), config, Nodes.of_size(case.gpus, world))
    plan = replace(make_plan(config, world), accumulates=case.accumulates)
    specs = assign_tiers([spec for unit in found.units for spec in unit], plan)
    return case, {tier: count_bytes(specs, plan, tier) for tier in Tier}


# Where shards of parameters fill the host up to `max_in_cpu`, and go on to a disk.
LARGE = {**SHAPES["Llama 70B"], "layers": 8, "gpus": 1, "nodes": 1, "stage": 3, "offload_param": "nvme"}


@pytest.mark.parametrize("seed", range(12))
def test_model_states_are_the_plans(seed):
    rng = random.Random(seed)
    cases = [random_values(rng) for _ in range(4)]
    cases += [{**random_values(rng), **LARGE, "offload_optimizer": "nvme"}] if seed < 3 else []
    for values in cases:
        case, plan = planned(values)
        whole = sum(tier.total for tier in plan.values())
        device, host, disk = plan[Tier.DEVICE], plan[Tier.HOST], plan[Tier.NVME]
        for name, said, exact in (
            ("parameters", formulas.stored_parameters(case), device.parameters),
            ("gradients", formulas.stored(case, case.device_gradients), device.gradients),
            ("masters", formulas.masters(case), device.masters),
            ("moments", formulas.moments(case), device.states),
            ("host", formulas.host_bytes(case) / case.gpus - PROCESS, host.total),
            ("host parameters", formulas.host_parameters(case) / case.gpus, host.parameters),
            ("nvme", formulas.nvme_bytes(case) / case.gpus, disk.total),
        ):
            assert said == pytest.approx(exact, rel=0.01, abs=0.01 * whole), (name, values)


@pytest.mark.parametrize("offload_optimizer", CHOICES["offload_optimizer"])
@pytest.mark.parametrize("offload_param", CHOICES["offload_param"])
@pytest.mark.parametrize("master_dtype", ["bf16_int16", "bf16_int8"])
def test_split_masters_are_the_plans_in_every_tier(offload_optimizer, offload_param, master_dtype):
    values = {**DEFAULTS, **SHAPES["GPT 125M"], "gpus": 2, "stage": 3, "state_dtype": "int8"}
    values |= {"offload_optimizer": offload_optimizer, "offload_param": offload_param, "master_dtype": master_dtype}
    case, plan = planned(values)
    for name, said, exact in (
        ("parameters", formulas.stored_parameters(case), plan[Tier.DEVICE].parameters),
        ("masters", formulas.masters(case), plan[Tier.DEVICE].masters),
        ("host", formulas.host_bytes(case) / case.gpus - PROCESS, plan[Tier.HOST].total),
        ("nvme", formulas.nvme_bytes(case) / case.gpus, plan[Tier.NVME].total),
    ):
        assert said == pytest.approx(exact, rel=0.01, abs=1e6), name


def forecast_of(values: dict[str, Any]) -> Any:
    case = case_of(values)

    def loss_of(batch: int, length: int) -> Any:
        tokens = torch.zeros(batch, length, dtype=torch.long, device=META)
        return lambda call: call(tokens, tokens)

    source = ModelSource("decoder", lambda: model_of(case), loss_of, case.vocabulary)
    gpu = Gpu(int(case.gpu_memory), 1e15, 1e12, 1e11, 1e10)
    machine = Machine("GPU", gpu, case.gpus, case.nodes, int(case.host_memory), int(case.nvme))
    config = config_of(values)
    question = Question(source, machine, config, case.micro_batch, case.sequence_length)
    (found,) = forecast(question, [Setting("page", config["zero_optimization"])], finds_batch=False)
    return found


@pytest.mark.parametrize("seed", one_in(3, range(8)))
def test_the_peak_of_a_gpu_is_that_of_the_dry_run(seed):
    rng = random.Random(100 + seed)
    # A dry run has all on the device, where a single rank in stage 3 is cut otherwise than with offload.
    gpus = rng.choice([2, 8])
    values = random_values(rng, gpus=gpus, accumulation=1, precision="fp32" if seed == 7 else "bf16", stage=seed % 4)
    values["sequence_parallel"] = 1 + seed // 4
    case, found = case_of(values), forecast_of(values)
    assert formulas.allocated(case) == pytest.approx(found.device.allocated, rel=0.1), values
    # What the allocator keeps is a share of that here, and replayed there.
    assert formulas.gpu_bytes(case) == pytest.approx(found.device.total, rel=0.15), values
    assert formulas.host_bytes(case) == pytest.approx(found.host_node, rel=0.01)
    if found.device.logits and formulas.logits(case):
        assert formulas.logits(case) == pytest.approx(found.device.logits, rel=0.01)
        assert formulas.activations(case) == pytest.approx(found.device.activations, rel=0.1)
        assert formulas.gathered(case) == pytest.approx(found.device.gathered, rel=0.1)


def test_weights_in_fp8_are_gathered_with_one_byte_per_element():
    short = {
        "micro_batch": 1,
        "sequence_length": 1024,
        "layers": 4,
        "offload_optimizer": "none",
        "recompute": True,
        "tied": False,
    }
    found = {}
    for precision in ("bf16", "fp8"):
        values = random_values(
            random.Random(101), **short, precision=precision, gpus=8, nodes=1, accumulation=1, stage=3
        )
        case, found[precision] = case_of(values), forecast_of(values)
        assert formulas.allocated(case) == pytest.approx(found[precision].device.allocated, rel=0.1), values
        assert case.gathered_itemsize == (1 if precision == "fp8" else 2)
    assert found["fp8"].device.gathered == pytest.approx(found["bf16"].device.gathered / 2, rel=0.01)


@pytest.mark.parametrize(("seed", "tiled_loss"), [(0, False), (1, True), more(0, True), more(1, False)])
def test_tiles_and_inputs_on_the_host_are_those_of_the_dry_run(seed, tiled_loss):
    """Without logits, the peak is in backward, which the formulas overestimate by up to 12%."""
    long = {"micro_batch": 4, "sequence_length": 8192, "layers": 8, "offload_optimizer": "none", "precision": "bf16"}
    tiles = {"recompute": True, "host_checkpoints": True, "tiled_loss": tiled_loss}
    values = random_values(random.Random(102 + seed), **long, **tiles, gpus=2, nodes=1, accumulation=1, stage=2 + seed)
    case, found = case_of(values), forecast_of(values)
    assert formulas.allocated(case) == pytest.approx(found.device.allocated, rel=0.15 if tiled_loss else 0.03), values
    assert formulas.host_bytes(case) == pytest.approx(found.host_node, rel=0.01)
    assert formulas.host_activations(case) == 2 * 8 * 4 * 8192 * case.hidden * 2
    assert formulas.logits(case) == pytest.approx(found.device.logits, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["Llama 7B", pytest.param("Llama 13B", marks=pytest.mark.slow)])
def test_large_blocks_are_gathered_within_the_limits(name, recompute):
    """Sixteen blocks of a known shape: more than `stage3_max_live_parameters`."""
    values = {**DEFAULTS, **SHAPES[name], "layers": 16, "stage": 3, "recompute": recompute}
    case, found = case_of(values), forecast_of(values)
    assert found.device.gathered <= case.itemsize * formulas.MAX_LIVE
    assert formulas.gathered(case) == pytest.approx(found.device.gathered, rel=0.02)
    assert formulas.allocated(case) == pytest.approx(found.device.allocated, rel=0.1)


@pytest.mark.parametrize(
    ("name", "billions"), [("GPT 125M", 0.124), ("GPT 1.3B", 1.31), ("Llama 1B", 1.236), ("Llama 7B", 6.738)]
)
def test_known_shapes_have_their_size(name, billions):
    assert formulas.num_parameters(case_of({**DEFAULTS, **SHAPES[name]})) / 1e9 == pytest.approx(billions, rel=0.01)


def test_kinds_add_up_to_the_whole():
    for seed in range(200):
        case = case_of(random_values(random.Random(seed)))
        for kinds, total in ((GPU_KINDS, "gpu_bytes"), (HOST_KINDS, "host_bytes"), (NVME_KINDS, "nvme_bytes")):
            parts = [getattr(formulas, name)(case) for name in kinds.values()]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(getattr(formulas, total)(case))


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_is_generated():
    assert PAGE.read_text() == page(), "run `make docs`"


def test_no_request_leaves_the_page():
    text = PAGE.read_text()
    assert not re.findall(r"https?://|//[a-z]+\.|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest|<link", text)
    assert "default-src 'none'" in text


def test_the_page_finds_the_row_of_each_setting():
    """As its script does: a place from the choices, a row, and bytes per element."""
    table = json.loads(json.dumps(planned_table()))
    for seed in range(300):
        values, place = random_values(random.Random(seed)), 0
        for name in table["setting"]:
            place = place * len(CHOICES[name]) + CHOICES[name].index(values[name])
        place = (place * 2 + (values["accumulation"] > 1)) * 2 + (values["gpus"] * values["nodes"] > 1)
        row = dict(zip(table["columns"], table["rows"][table["places"][place]], strict=True))
        found = {name: PerElement(*value) if isinstance(value, list) else value for name, value in row.items()}
        assert found == planned_states(values), values


# Of one case; the others have more arguments, and are called by these.
FORMULAS = [
    name
    for name, each in inspect.getmembers(formulas, inspect.isfunction)
    if each.__module__ == formulas.__name__ and list(inspect.signature(each).parameters) == ["case"]
]


@in_a_browser
def test_the_script_computes_what_python_does(tmp_path):
    rng = random.Random(5)
    cases = [case_of(random_values(rng)) for _ in range(300)]
    cases += [case_of({**random_values(rng), **shape}) for shape in SHAPES.values() for _ in range(10)]
    script = (
        f"(formulas => data[0].map(each => data[1].map(name => formulas[name](each))))({translate_module(formulas)})"
    )
    found = evaluate(tmp_path, script, [[asdict(case) for case in cases], FORMULAS])
    for case, results in zip(cases, found, strict=True):
        exact = [getattr(formulas, name)(case) for name in FORMULAS]
        assert results == pytest.approx(exact, rel=1e-9), case


STATES: list[dict[str, Any]] = [
    {},
    {**SHAPES["Llama 70B"], "stage": 3, "nodes": 4, "micro_batch": 2, "state_dtype": "int8"},
    {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_param": "cpu",
        "gpus": 2,
        "gpu_memory": 24,
        "recompute": False,
        "master_dtype": "bf16_int8",
    },
    {
        **SHAPES["GPT 125M"],
        "stage": 0,
        "offload_optimizer": "cpu",
        "precision": "fp32",
        "accumulation": 8,
        "master_dtype": "bf16_int16",
    },
]


@in_a_browser
@pytest.mark.parametrize("place", range(len(STATES)))
def test_the_page_shows_what_python_says(place):
    values = {**DEFAULTS, **STATES[place]}
    link = {name: int(value) if isinstance(value, bool) else value for name, value in STATES[place].items()}
    dom = dump_dom(PAGE, f"#{urlencode(link)}")
    case = case_of(values)
    shown = {
        (part, kind): float(number)
        for part, kind, number in re.findall(r'data-part="(\w+)" data-kind="([^"]+)" data-bytes="([^"]+)"', dom)
    }
    said = {
        (part, kind): getattr(formulas, name)(case)
        for part, kinds in (("gpu", GPU_KINDS), ("host", HOST_KINDS), ("nvme", NVME_KINDS))
        for kind, name in {**kinds, "total": f"{part}_bytes"}.items()
    }
    assert shown == pytest.approx(said, rel=1e-9)
    assert f'data-fits="{str(formulas.fits(case)).lower()}"' in dom
    config = re.search(r'<pre id="config"[^>]*>(.*?)</pre>', dom, re.DOTALL)
    assert config is not None
    document = json.loads(unescape(config[1]))
    assert document == config_of(values)
    assert load_config(document).zero_optimization.stage == values["stage"]


@in_a_browser
def test_a_link_that_is_not_understood_is_told():
    dom = dump_dom(PAGE, "#layers=many&gpus=4&hidden=-1&colour=red")
    told = re.search(r'<ul class="bad" id="problems">(.*?)</ul>', dom, re.DOTALL)
    assert told is not None
    assert "layers=many, hidden=-1, colour=red" in unescape(told[1])
    shown = re.search(r'data-part="gpu" data-kind="total" data-bytes="([^"]+)"', dom)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(formulas.gpu_bytes(case_of({**DEFAULTS, "gpus": 4})), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "verdict"), [(2, False), (3, True)])
def test_the_command_and_the_page_agree_on_the_7b_of_the_guide(stage, verdict):
    pytest.importorskip("transformers")
    values = {**DEFAULTS, "stage": stage, "micro_batch": 4, "sequence_length": 2048, "recompute": False}
    case = case_of(values)
    question = Question(find_model("llama-7b"), find_machine("8xA100"), DEFAULT_CONFIG, 4, 2048)
    (found,) = forecast(question, [Setting("", {"stage": stage, "overlap_comm": True})], finds_batch=False)
    assert formulas.gpu_bytes(case) == pytest.approx(found.device.total, rel=0.01)
    assert (formulas.fits(case), found.fits) == (verdict, verdict)


def test_overhead_is_the_commands():
    case = case_of(DEFAULTS)
    assert formulas.reserve(case) == FRAGMENTATION * formulas.allocated(case)
    tight = replace(case, gpu_memory=formulas.gpu_bytes(case) * 1.04)
    assert (formulas.fits(tight), formulas.is_tight(tight)) == (True, True)
    assert not formulas.is_tight(replace(case, gpu_memory=formulas.gpu_bytes(case) * 1.1))
    assert not formulas.is_tight(replace(case, gpu_memory=formulas.gpu_bytes(case) * 0.9))


def test_a_machine_that_is_chosen_brings_its_gpus_and_its_host():
    for label, values in machines().items():
        number, name = re.findall(r"^(\d+) x (\S+),", label)[0]
        machine = find_machine(f"{number}x{name}")
        assert values["gpus"] == machine.gpus
        assert [values[key] * GB for key in ("gpu_memory", "host_memory", "nvme")] == [
            machine.gpu.memory, machine.host_memory, machine.nvme,
        ]  # fmt: skip
    assert machines()["1 x 4090, 24 GB"]["host_memory"] == 64
    assert settings()["stage 3 + optimizer nvme, param cpu"] == {
        "stage": 3, "offload_optimizer": "nvme", "offload_param": "cpu",
    }  # fmt: skip


def test_verdicts_of_well_known_cases():
    seven = {**DEFAULTS, **SHAPES["Llama 7B"]}
    assert not formulas.fits(case_of({**seven, "stage": 0}))
    assert formulas.fits(case_of({**seven, "stage": 3}))
    assert formulas.fits(case_of({**seven, "stage": 2, "gpus": 1, "gpu_memory": 80, "offload_optimizer": "cpu"}))
    assert not formulas.fits(case_of({**seven, "stage": 3, "offload_optimizer": "cpu", "host_memory": 64}))
    assert not formulas.fits(case_of({**seven, "stage": 3, "offload_optimizer": "nvme", "nvme": 0}))
    assert formulas.gpu_bytes(case_of({**seven, "stage": 3, "nodes": 64})) < 80 * GB
