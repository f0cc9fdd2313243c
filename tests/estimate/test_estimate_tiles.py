"""Forecasts of tiles and of checkpoints on the host: memory, traffic, the largest batch, and the advised keys."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from onefold.tools.estimate.advice import advise
from onefold.tools.estimate.forecast import HOST_SHARE, Forecast, forecast
from onefold.tools.estimate.machines import GB, Machine, adjust, find_machine
from onefold.tools.estimate.models import find_model, from_transformers
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting, settings_for

pytest.importorskip("transformers")

LAYERS, WIDTH, TOKENS, VOCABULARY = 6, 256, 4096, 32_000
INPUT = TOKENS * WIDTH * 2
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}


def question_of(batch: int = 1, machine: Machine | None = None, recompute: bool = True, **keys: Any) -> Question:
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": 2048,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": TOKENS,
    }  # fmt: skip
    source = from_transformers("a small Llama", shape, recompute=recompute)
    return Question(source, machine or find_machine("2xH100"), {**DEFAULT_CONFIG, **keys}, batch, TOKENS)


def stage_3(question: Question) -> Setting:
    return next(each for each in settings_for(question.machine) if each.name == "stage 3")


def forecast_of(question: Question, **options: Any) -> Forecast:
    (found,) = forecast(question, [stage_3(question)], **{"finds_batch": False, **options})
    return found


@functools.cache
def on_host() -> Forecast:
    return forecast_of(question_of(**ON_HOST))


def test_inputs_on_the_host_are_counted_there_and_as_traffic():
    plain, host = forecast_of(question_of()), on_host()
    assert host.host_node - plain.host_node == 2 * LAYERS * INPUT
    for name in ("down", "up"):
        assert getattr(host.offload_traffic, name) - getattr(plain.offload_traffic, name) == LAYERS * INPUT
    assert host.seconds["host bus"] == pytest.approx(LAYERS * INPUT / find_machine("2xH100").gpu.bus)
    # At the logits, the peak, all inputs of blocks are on the host.
    assert plain.device.activations - host.device.activations == LAYERS * INPUT


def test_inputs_are_moved_in_every_micro_step():
    found = forecast_of(question_of(gradient_accumulation_steps=3, **ON_HOST))
    assert found.offload_traffic.up == 3 * LAYERS * INPUT
    assert found.host_node == on_host().host_node


def test_a_cpu_machine_has_its_inputs_on_the_host_anyway():
    machine = replace(find_machine("2xH100"), is_cpu=True)
    assert forecast_of(question_of(machine=machine, **ON_HOST)).offload_traffic.up == 0


def test_the_tiled_loss_has_no_logits_and_tiled_mlps_fewer_activations():
    plain = forecast_of(question_of(batch=2, onefold={"tiled_loss": 16}))
    tiled = forecast_of(question_of(batch=2, onefold={"tiled_loss": 16, "tiled_mlp": 8}))
    whole = forecast_of(question_of(batch=2))
    assert whole.device.logits >= 3 * 2 * TOKENS * VOCABULARY * 4
    assert plain.device.logits < whole.device.logits // 4
    assert tiled.device.total < plain.device.total < whole.device.total


@pytest.mark.slow
def test_the_largest_batch_fits_on_the_host():
    """Check that one sample more would be too much for the host, and that the forecast of the batch fits."""
    question = question_of(**ON_HOST)
    plain = forecast_of(question)
    room = plain.host_node + 3 * 2 * LAYERS * INPUT
    machine = adjust(question.machine, host_memory=int(room / HOST_SHARE) + 1000)
    found = forecast_of(replace(question, machine=machine), finds_batch=True)
    assert found.largest_batch == 4
    assert forecast_of(replace(question, machine=machine, micro_batch=4)).fits
    assert not forecast_of(replace(question, machine=machine, micro_batch=5)).fits
    smaller = forecast_of(replace(question, machine=machine, micro_batch=9), finds_batch=True)
    assert smaller.largest_batch == 4


@pytest.mark.slow
def test_keys_are_advised_by_what_they_save_where_nothing_fits():
    question = question_of(batch=16)
    whole = forecast_of(question)
    tiled = forecast_of(question.with_key("onefold", "tiled_loss", True))
    saved = (whole.device.total - tiled.device.total) / GB
    machine = adjust(question.machine, memory=(whole.device.total + tiled.device.total) // 2)
    question = replace(question, machine=machine)
    said = advise(question, [forecast_of(question)]).reason
    assert f"onefold.tiled_loss saves {saved:.1f} GB" in said
    assert "of each GPU" in said
    assert "It fits with" in said.partition("of each GPU")[2]
    for key in ("onefold.tiled_mlp", "activation_checkpointing.cpu_checkpointing"):
        section, _, name = key.partition(".")
        gain = whole.device.total - forecast_of(question.with_key(section, name, True)).device.total
        assert (f"{key} saves {gain / GB:.1f} GB" in said) == (gain >= GB // 10)


@pytest.mark.slow
def test_keys_that_are_set_or_that_a_model_does_not_support_are_not_advised():
    set_ones = question_of(batch=16, onefold={"tiled_loss": True, "tiled_mlp": True}, **ON_HOST)
    preset = Question(find_model("25m"), set_ones.machine, DEFAULT_CONFIG, 64, 1024)
    for question in (set_ones, preset):
        machine = adjust(question.machine, memory=forecast_of(question).device.total - 10_000_000)
        said = advise(tight := replace(question, machine=machine), [forecast_of(tight)]).reason
        assert said.startswith("no setting fits")
        assert "tiled_loss" not in said
        assert "cpu_checkpointing" not in said
