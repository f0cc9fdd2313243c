"""Hyperparameters, wherever they are given: in a config, in the groups of `model_parameters`, in an instance."""

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from onefold.config import ConfigError, check_built, load_config
from onefold.config.keys import Key, as_number, entries, read_as
from onefold.config.params import OPTIMIZERS
from onefold.optim.choose import choose
from onefold.optim.chosen import ChosenOptimizer
from onefold.plan.optimizer_spec import make_optimizer_spec

LIKE_TORCH = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3))]


def named(name: str, params: dict[str, Any], *groups: dict[str, Any]) -> ChosenOptimizer:
    config = load_config({"optimizer": {"type": name, "params": params}})
    check_built(config)
    spec = make_optimizer_spec(config)
    chosen = choose(None, spec, [{"params": parameters(), **group} for group in groups] or parameters())
    assert chosen is not None
    return chosen


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"maximize": "no"}, r"maximize = 'no': expected true or false"),
    ("AdamW", {"maximize": 1}, r"maximize = 1: expected true or false"),
    ("AdamW", {"amsgrad": "yes"}, r"amsgrad = 'yes': expected true or false"),
    ("Adam", {"adam_w_mode": "off"}, r"adam_w_mode = 'off': expected true or false"),
    ("AdamW", {"fused": "maybe"}, r"fused = 'maybe': expected true or false"),
    ("AdamW", {"betas": [0.9, 1.0]}, r"betas\[1\] = 1\.0: expected a number of at least 0 and below 1"),
    ("AdamW", {"betas": [1.5, 0.9]}, r"betas\[0\] = 1\.5"),
    ("AdamW", {"betas": [-0.1, 0.9]}, r"betas\[0\] = -0\.1"),
    ("AdamW", {"betas": [0.9]}, r"betas = \[0\.9\]: expected a list of 2 numbers"),
    ("AdamW", {"betas": [0.9, 0.99, 0.999]}, r"betas = \[.*\]: expected a list of 2 numbers"),
    ("AdamW", {"betas": 0.9}, r"betas = 0\.9: expected a list of 2 numbers"),
    ("AdamW", {"betas": "0.9, 0.99"}, r"betas = '0\.9, 0\.99': expected a list of 2 numbers"),
    ("AdamW", {"betas": [0.9, True]}, r"betas\[1\] = True: expected a number"),
    ("Lion", {"betas": [2, 3]}, r"betas\[0\] = 2: expected"),
    ("AdamW", {"lr": math.inf}, r"lr = inf: expected a finite number"),
    ("AdamW", {"lr": "Infinity"}, r"lr = inf: expected a finite number"),
    ("AdamW", {"lr": math.nan}, r"lr = nan: expected a number"),
    ("AdamW", {"lr": True}, r"lr = True: expected a number"),
    ("AdamW", {"lr": -1e-3}, r"lr = -0\.001: expected at least 0"),
    ("AdamW", {"lr": "fast"}, r"lr = 'fast': expected a number"),
    ("AdamW", {"lr": [0.1]}, r"lr = \[0\.1\]: expected a number"),
    ("AdamW", {"lr": {"start": 0.1}}, r"lr = \{'start': 0\.1\}: expected a number"),
    ("AdamW", {"eps": -1}, r"eps = -1: expected at least 0"),
    ("AdamW", {"weight_decay": math.inf}, r"weight_decay = inf: expected a finite"),
    ("SGD", {"momentum": 2.0}, r"momentum = 2\.0: expected a number from 0 to 1"),
    ("SGD", {"momentum": -1}, r"momentum = -1: expected a number from 0 to 1"),
    ("SGD", {"dampening": math.nan}, r"dampening = nan: expected a number"),
    ("SGD", {"nesterov": True}, r"nesterov = true needs .*momentum above 0"),
    ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, r"nesterov = true needs .*dampening 0"),
    ("Adagrad", {"lr_decay": -1}, r"lr_decay = -1: expected at least 0"),
    ("Adagrad", {"initial_accumulator_value": -1}, r"initial_accumulator_value = -1: expected at least 0"),
]


@pytest.mark.parametrize(("name", "params", "told"), WRONG)
def test_a_wrong_value_names_its_key_wherever_it_is_given(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{told}"):
        load_config({"optimizer": {"type": name, "params": params}})
    if params != {"lr": "Infinity"}:
        with pytest.raises(ConfigError, match=rf"^model_parameters\[1\]\.{told}"):
            named(name, {}, {}, params)


@pytest.mark.parametrize(
    ("name", "key", "meant"),
    [
        ("AdamW", "learning_rate", "lr"),
        ("AdamW", "LR", "lr"),
        ("AdamW", "beta1", "betas"),
        ("AdamW", "momentum", "betas"),
        ("AdamW", "wd", "weight_decay"),
        ("AdamW", "weightDecay", "weight_decay"),
        ("AdamW", "weight_decy", "weight_decay"),
        ("AdamW", "epsilon", "eps"),
        ("SGD", "beta1", "momentum"),
        ("SGD", "betas", "momentum"),
        ("SGD", "use_nesterov", "nesterov"),
        ("Lion", "learning-rate", "lr"),
        ("NAdam", "learning_rate", "lr"),
        ("NAdam", "epsilon", "eps"),
        ("RMSprop", "mom", "momentum"),
    ],
)
def test_another_name_for_a_key_is_told_its_own(name: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{key}: .*did you mean optimizer\.params\.{meant}\?"):
        named(name, {key: 0.1})


def test_a_key_of_another_section_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match="did you mean gradient_clipping"):
        named("AdamW", {"gradient_clipping": 1.0})


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("NAdam", {"betas": [0.9]}, r"betas = \[0\.9\]: expected a list of 2 numbers"),
        ("NAdam", {"betas": [None, 0.9, 0.9]}, r'betas\[0\] is "auto" or null'),
        ("NAdam", {"betas": [1.5, 0.9]}, r"betas = \(1\.5, 0\.9\): Invalid beta"),
        ("NAdam", {"lr": "fast"}, r"lr = 'fast': expected a number"),
        ("NAdam", {"lr": math.inf}, r"lr = inf: expected a finite"),
        ("NAdam", {"lr": True}, r"lr = True: expected a number"),
        ("NAdam", {"lr": 0.1, "momentum_decay": -1}, r"momentum_decay = -1\.0: Invalid momentum_decay"),
        ("NAdam", {"maximize": "no"}, r"maximize = 'no': expected true or false"),
        ("RMSprop", {"lr": 0.1, "momentum": -1}, r"momentum = -1\.0: Invalid momentum"),
        ("Rprop", {"etas": [2, 3]}, r"etas = \(2\.0, 3\.0\): Invalid eta"),
        ("Adadelta", {"rho": 7}, r"rho = 7\.0: Invalid rho"),
        ("NAdam", {"params": 3}, r"params: NAdam has no parameter"),
    ],
)
def test_a_class_of_torch_is_read_by_its_signature(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{told}"):
        named(name, params)


def test_strings_become_what_a_class_of_torch_annotates() -> None:
    (group,) = named("NAdam", {"lr": "1e-3", "betas": ["0.9", 0.99], "maximize": "true", "foreach": "false"}).groups
    assert (group["lr"], group["betas"], group["maximize"], group["foreach"]) == (1e-3, (0.9, 0.99), True, False)


def test_the_words_for_booleans_are_read() -> None:
    (group,) = named("Adam", {"amsgrad": "false", "maximize": "True", "adam_w_mode": "false"}).groups
    assert (group["amsgrad"], group["maximize"], group["decoupled_weight_decay"]) == (False, True, False)
    assert named("AdamW", {"adam_w_mode": False}).groups[0]["decoupled_weight_decay"], "as in DeepSpeed"
    assert named("Adam", {}).groups[0]["decoupled_weight_decay"], "as in DeepSpeed"


@pytest.mark.parametrize("params", [{"bias_correction": False}, {"differentiable": True}])
def test_what_no_rule_does_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{next(iter(params))} = "):
        named("Adam", params)
    with pytest.raises(ConfigError, match=rf"model_parameters\[0\]\.{next(iter(params))} = "):
        named("Adam", {}, params)


# Groups of model_parameters


def test_a_group_has_its_own_values_and_the_configs() -> None:
    groups = named("AdamW", {"lr": 0.1, "weight_decay": 0.5}, {"lr": "0.2"}, {"weight_decay": 0}).groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.2, 0.5), (0.1, 0.0)]


@pytest.mark.parametrize(("key", "meant"), [("learning_rate", "lr"), ("wd", "weight_decay"), ("Lr", "lr")])
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_a_group_that_misspells_is_refused(name: str, key: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"model_parameters\[0\]\.{key}: .*Did you mean model_parameters\[0\]\.{meant}"
    ):
        named(name, {}, {key: 0.1})


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_a_group_may_have_keys_of_the_users_own(name: str) -> None:
    own = {"name": "head", "lr_scale": 2, "initial_lr": 0.1, "max_lr": 1, "min_lr": 0, "rank": 3, "decay": True}
    (group,) = named(name, {}, own).groups
    assert {key: group[key] for key in own} == own


def test_the_groups_of_a_torch_optimizer_are_accepted() -> None:
    """Accelerate hands the groups of a torch optimizer on, with all that torch has put there."""
    (theirs,) = torch.optim.AdamW(parameters(), lr=0.3).param_groups
    (group,) = named("AdamW", {}, {key: value for key, value in theirs.items() if key != "params"}).groups
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.01)


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(0.1)
    assert named("AdamW", {}, {"lr": rate}).groups[0]["lr"] is rate
    with pytest.raises(ConfigError, match=r"model_parameters\[0\]\.lr = -1\.0: expected at least 0"):
        named("AdamW", {}, {"lr": torch.tensor(-1.0)})


# Instances


@pytest.mark.parametrize(
    ("kind", "group", "told"),
    [
        (torch.optim.Adam, {"betas": (1.5, 0.9)}, r"betas\[0\] = 1\.5"),
        (torch.optim.AdamW, {"lr": math.inf}, r"lr = inf: expected a finite number"),
        (torch.optim.AdamW, {"lr": math.nan}, r"lr = nan"),
        (torch.optim.AdamW, {"differentiable": True}, r"differentiable = True"),
        (torch.optim.SGD, {"nesterov": True}, r"nesterov = true needs"),
        (torch.optim.SGD, {"momentum": -1}, r"momentum = -1"),
        (torch.optim.Adagrad, {"lr_decay": -1}, r"lr_decay = -1"),
    ],
)
def test_a_group_of_an_instance_is_checked_too(kind: Any, group: dict[str, Any], told: str) -> None:
    instance = kind([{"params": parameters()}, {"params": parameters(), **group}])
    with pytest.raises(ConfigError, match=rf"^optimizer\.param_groups\[1\]\.{told}"):
        choose(instance, None, [])


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_what_torch_takes_as_an_instance_is_taken(name: str) -> None:
    kind: Any = LIKE_TORCH[name]
    options: list[dict[str, Any]] = [{}, {"lr": 0.0}, {"fused": True}, {"foreach": True}, {"maximize": True}]
    for more in options:
        chosen = choose(kind(parameters(), **more), None, [])
        assert chosen is not None
        assert len(chosen.rules) == 1
    if name == "sgd":
        assert choose(kind(parameters(), momentum=1.0, nesterov=True), None, []) is not None


# The table


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_the_table_has_torchs_parameters_and_defaults(name: str) -> None:
    """What torch's class takes is known by the same name, and is worth the same where DeepSpeed has no other mind."""
    table = {key: entry.default for key, entry in entries(OPTIMIZERS[name]).items()}
    defaults = LIKE_TORCH[name](parameters()).defaults
    assert set(defaults) <= {*table, "decoupled_weight_decay"}
    other = {"adamw": {"weight_decay"}, "adam": {"decoupled_weight_decay"}}.get(name, set())
    assert {key: value for key, value in defaults.items() if key not in other} == {
        key: table[key] for key in defaults if key not in other
    }


# The readers by property


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text(), st.none()))
@example(value="010")
@example(value="1_000")
@example(value="٣")
def test_a_number_is_read_or_refused_and_never_something_else(value: Any) -> None:
    number = None
    with suppress(ConfigError):
        number = read_as("here", value, float, Key("", minimum=0))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300:
        assert number == float(value)
    elif not isinstance(value, str):
        assert number is None
    if number is not None:
        assert isinstance(number, float)
        assert number == float(value)
        assert number >= 0


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.integers(-(10**12), 10**12), st.floats(-1e12, 1e12)))
def test_a_number_and_its_spelling_are_one(value: float) -> None:
    assert as_number(repr(value)) == value
    assert as_number(f" {value} ") == value


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="0123456789_.:xeE+-", max_size=8))
def test_a_string_is_a_number_only_if_python_reads_it_as_the_same(text: str) -> None:
    number = as_number(text)
    if isinstance(number, str):
        assert number == text
    else:
        assert number == float(text)
        digits = text.lstrip("+-").partition(".")[0].partition("e")[0].partition("E")[0]
        assert digits in ("", "0") or not digits.startswith("0")


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.floats()), st.none()))
@example(value="no")
@example(value="TRUE ")
@example(value=1)
def test_a_boolean_is_a_word_or_a_boolean(value: Any) -> None:
    words = {"true": True, "false": False}
    if isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in words):
        expected = value if isinstance(value, bool) else words[value.strip().lower()]
        assert read_as("here", value, bool, Key("")) is expected
    else:
        with pytest.raises(ConfigError, match="here = "):
            read_as("here", value, bool, Key(""))
