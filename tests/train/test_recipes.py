"""Recipes, formats of rows, and what is done with a trained adapter."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.tools.cli.main import main
from onefold.tools.cli.trained_models import _Dialog, find_trained
from onefold.tools.train.data import DataError
from onefold.tools.train.options import (
    OptionError,
    TrainOptions,
    add_arguments,
    add_job_arguments,
    add_recipe,
    prepare_config,
)
from onefold.tools.train.recipe import options_of, read_recipe, with_recipe, write_recipe
from onefold.tools.train.rows import alpaca_prompt, check_first_rows, format_of, is_rows, read_row
from onefold.tools.train.tokens import Rows, Tokens

pytestmark = pytest.mark.program


def given(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_recipe(parser)
    add_arguments(parser)
    add_job_arguments(parser)
    return with_recipe(parser.parse_args(list(flags)))


def recipe(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


# -- recipes -----------------------------------------------------------------------------------------------------


def test_keys_of_a_recipe_are_flags_and_flags_of_the_command_replace_them(tmp_path: Path) -> None:
    path = recipe(tmp_path, """
        model: base
        data: [rows.jsonl, more]
        eval-data: held.parquet
        qlora: true
        epochs: 3
        lr: 1e-4            # text in YAML 1.1
        batch: 2
        precision: bf16
        no-save: false
        ranks: 4
    """)  # fmt: skip
    found = given(path, "--lr", "2e-4")
    inside = [str(tmp_path / name) for name in ("base", "rows.jsonl", "more", "held.parquet")]
    assert found.ranks == 4
    assert options_of(found) == TrainOptions(
        model=inside[0], data=tuple(inside[1:3]), eval_data=(inside[3],), qlora=16, epochs=3.0, lr=2e-4, batch=2,
        precision="bf16",
    )  # fmt: skip
    instead = options_of(given(path, "--steps", "7", "--lora", "8"))
    assert (instead.steps, instead.epochs, instead.lora, instead.qlora) == (7, None, 8, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3", "epoch is not a key of a recipe. Did you mean epochs?"),
        ("resume: runs/a", "resume is not a key of a recipe"),
        ("qqq: 3", "Keys are the flags of onefold train"),
        ("bf16: false", "bf16 is not a key of a recipe. Did you mean precision?"),
        ("save-16bit-model: false", "save-16bit-model is not a key of a recipe. Did you mean no-save?"),
        ("batch: [1, 2]", "batch is [1, 2]. Give one value"),
        ("batch: many", "--batch: 'many' is not a whole number"),
        ("lr: true", "lr is True. Give one value"),
        ("no-save: 1", "no-save is 1. Give true or false"),
        ("data: [[a]]", "data is [['a']]. Give a list"),
        ("steps: 3\nepochs: 1", "not allowed with argument"),
        ("steps: 3\nsteps: 4", "given twice"),
        ("- steps", "recipe cannot be read"),
    ],
)
def test_mistakes_in_a_recipe_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(OptionError) as raised:
        given(path)
    assert words in str(raised.value)
    assert path in str(raised.value)


def test_a_run_writes_its_recipe_and_the_recipe_starts_such_a_run(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 6}')
    made = TrainOptions(
        config=str(tmp_path / "ds.json"), stage=2, steps=9, model=str(tmp_path / "m"), qlora=4,
        out=str(tmp_path / "run"),
        data=(str(tmp_path / "a b.jsonl"),), prompt="who: ", save=False, lr=3e-5, precision="fp16", eval_every=2,
    )  # fmt: skip
    write_recipe(made)
    again = options_of(given(str(tmp_path / "run/recipe.yaml"), "--out", str(tmp_path / "run")))
    assert again == TrainOptions(**{**vars(made), "config": str(tmp_path / "run/ds_config.json")})
    with pytest.raises(OptionError, match="reads the recipe in its folder"):
        given(str(tmp_path / "run/recipe.yaml"), "--resume", str(tmp_path / "run"))


def test_precision_replaces_the_sections_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true, "loss_scale": 8}, "train_batch_size": 4}')
    config = str(tmp_path / "ds.json")

    def document(precision: str | None, config: str | None = config, *, on_gpus: bool = True) -> dict[str, Any]:
        return prepare_config(TrainOptions(config=config, precision=precision), on_gpus=on_gpus).document

    assert document(None)["fp16"] == {"enabled": True, "loss_scale": 8}
    assert document("bf16")["bf16"] == {"enabled": True}
    assert document("bf16")["fp16"] == {"enabled": False, "loss_scale": 8}
    assert document("fp16")["fp16"] == {"enabled": True, "loss_scale": 8}
    assert document("fp32")["fp16"]["enabled"] is False
    assert document("fp32", None).get("bf16") is None
    assert document(None, None)["bf16"] == {"enabled": True}


def test_the_recipe_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/train.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found = options_of(given(recipe(tmp_path, text)))
    assert (found.qlora, found.epochs, found.lr, found.precision) == (16, 3.0, 1e-4, "bf16")
    assert found.model == str(tmp_path / "llama")


# -- formats of rows ---------------------------------------------------------------------------------------------

ROWS = [{"prompt": "Add 1 and 2.", "completion": "3"}, {"prompt": "Sing.", "completion": "la"}] * 3


def tokens_of(path: Path, held_out: tuple[str, ...] = ()) -> list[Any]:
    source = Rows([str(path)], Tokens(None, 0), 512, seed=1, held_out=held_out)
    return [source.train_rows(0, source.num_train), *(rows for rows, _ in source.held_out_rows(0, 1, 1))]


def test_lines_an_array_and_parquet_are_the_same_rows(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "a.json").write_text(" \n" + json.dumps(ROWS, indent=1))
    pq.write_table(pa.Table.from_pylist([{**row, "id": 1} for row in ROWS]), tmp_path / "a.parquet")
    found = [tokens_of(tmp_path / name) for name in ("a.jsonl", "a.json", "a.parquet")]
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 5
    check_first_rows([str(tmp_path)])
    (tmp_path / "object.json").write_text('{"text": "a"}')
    assert not is_rows(tmp_path / "object.json"), "text, as any other file"
    pq.write_table(pa.table({"question": ["x"], "answer": ["y"]}), tmp_path / "qa.parquet")
    with pytest.raises(DataError, match=r"qa.parquet: the columns are question, answer\. Give text, or prompt"):
        check_first_rows([str(tmp_path)])
    (tmp_path / "qa.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"qa\.parquet: not a parquet file"):
        check_first_rows([str(tmp_path)])


class Template(Tokens):
    """Bytes as tokens, with a chat template."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def chat(self, messages: Any, where: str) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in messages)


def test_sharegpt_and_chat_are_the_same_conversations(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ]
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    for name, row in {"chat.jsonl": {"messages": chat}, "sharegpt.jsonl": {"conversations": turns, "id": 3}}.items():
        (tmp_path / name).write_text(f"{json.dumps(row)}\n" * 2)
        source = Rows([str(tmp_path / name)], Template(), 512, seed=1)
        ((tokens, labels),) = source.train_rows(0, 1)
        assert bytes(tokens[:-1]).decode() == "<system>Be kind.<user>Hi<assistant>Hello"
        assert labels == tokens
    (tmp_path / "bad.jsonl").write_text(json.dumps({"conversations": [{"from": "narrator", "value": "x"}]}))
    with pytest.raises(DataError, match=r"bad.jsonl, line 1: from is narrator\. Use human, user, gpt"):
        check_first_rows([str(tmp_path / "bad.jsonl")])


def test_the_format_is_found_by_the_columns() -> None:
    assert format_of({"instruction": "a", "input": "", "output": "b"}) == "Alpaca"
    assert format_of({"text": "a", "label": 1}) == "text"
    assert format_of({"prompt": "a", "prompt_id": "b", "messages": []}) == "chat"
    assert format_of({"text": None}) is None
    assert format_of(["text"]) is None


def test_evaluation_data_is_held_out_and_the_other_rows_are_all_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "b.jsonl").write_text('{"text": "held out"}\n')
    trained, held_out = tokens_of(tmp_path / "a.jsonl", (str(tmp_path / "b.jsonl"),))
    assert len(trained) == len(ROWS)
    assert bytes(held_out[0][0][:-1]).decode() == "held out"
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"--eval-data .*b\.jsonl has no rows"):
        tokens_of(tmp_path / "a.jsonl", (str(tmp_path / "b.jsonl"),))


# -- the trained model -------------------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(find_spec("peft") is None, reason="transformers and peft are not installed")


@needs_transformers
@pytest.mark.parametrize(
    ("row_formats", "has_template", "words"),
    [
        ({"chat": 3, "text": 1}, True, "each line is a turn, in the chat template"),
        ({"ShareGPT": 3}, True, "each line is a turn, in the chat template"),
        ({"prompts": 2, "chat": 1}, True, "each line is a prompt, without a chat template"),
        ({"text": 1}, True, "each line is continued"),
        ({"Alpaca": 1}, True, "each line is an instruction in Alpaca's prompt"),
        (None, True, "each line is a turn, in the chat template"),
        (None, False, "each line is continued"),
    ],
)
def test_a_dialog_has_the_format_of_the_training_data(
    tmp_path: Path, row_formats: dict[str, int] | None, has_template: bool, words: str
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    text = Tokenizer(models.WordLevel({"hi": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}" if has_template else None
    tokenizer.save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=3, **shape)).save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("steps: 1")
    if row_formats is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"row_formats": row_formats}))
    dialog = _Dialog(find_trained(tmp_path), argparse.Namespace(seed=0, temperature=0, max_tokens=2))
    assert dialog.describe().startswith(words)
    dialog.answer("hi")


@needs_transformers
def test_folders_without_what_a_command_needs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*command: str) -> str:
        assert main([*command]) == 2
        return capsys.readouterr().err

    assert "no such folder" in refused("chat", str(tmp_path / "missing"))
    assert "no model. Give the folder of a run" in refused("merge", str(tmp_path))
    (tmp_path / "gpt/model").mkdir(parents=True)
    (tmp_path / "gpt/model/model.safetensors").touch()
    assert "the built-in GPT is not a model of transformers" in refused("chat", str(tmp_path / "gpt"))
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.json").write_text("{}")
    assert "no adapter to merge" in refused("merge", str(tmp_path / "whole"))
    assert "no tokenizer" in refused("chat", str(tmp_path / "whole"))
    (tmp_path / "run/adapter").mkdir(parents=True)
    (tmp_path / "run/adapter/adapter_config.json").write_text('{"base_model_name_or_path": "/gone"}')
    assert "the model of this adapter, /gone, is not there" in refused("merge", str(tmp_path / "run"))
    (tmp_path / "whole/config.json").write_text('{"quantization_config": {}}')
    (tmp_path / "run/recipe.yaml").write_text("model: ../whole\n")
    assert "would round its weights again" in refused("merge", str(tmp_path / "run"))
    (tmp_path / "run/merged").mkdir()
    (tmp_path / "run/merged/file").touch()
    assert "the folder is not empty" in refused("merge", str(tmp_path / "run"))


@needs_transformers
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.slow
def test_qlora_by_a_recipe_then_merge_and_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses in stages 2 and 3; the merged weights are those of the adapter on the model of the files."""
    examples = Path(__file__).parents[2] / "examples/huggingface"
    subprocess.run([sys.executable, str(examples / "tiny.py"), str(tmp_path / "base")], check=True, capture_output=True)
    rows = [{"prompt": "the cat ", "completion": "sleeps at home"}] * 30
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    path = recipe(tmp_path, """
        model: base
        data: rows.json
        qlora: 4
        epochs: 2
        lr: 3e-2
        batch: 2
        sequence-length: 64
        sample-length: 3
        ranks: 2
        save-every: 4
    """)  # fmt: skip
    losses: list[list[float]] = []
    for stage in ("2", "3"):
        run = tmp_path / stage
        command = [sys.executable, "-m", "onefold.tools.cli.main", "train", path, "--stage", stage, "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "QLoRA of rank 4" in done.stdout
        assert "28 rows" in done.stdout or "29 rows" in done.stdout
        assert f"onefold merge {run}" in done.stdout
        losses.append([json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    kept = read_recipe(run / "recipe.yaml")
    assert (kept.qlora, kept.epochs, hasattr(kept, "steps")) == (4, 2.0, False)
    capsys.readouterr()
    assert main(["merge", str(run)]) == 0
    assert f"the merged model is in {run}/merged" in capsys.readouterr().out
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(8)[None]
    before = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, str(run / "adapter"))(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")(input_ids=ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert (adapted - before).abs().max() > 1e-2
    answers = []
    for folder in (run, run / "merged"):
        assert main(["chat", str(folder), "--prompt", "the cat", "--temperature=0", "--max-tokens=5"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert "sleeps" in answers[0]
    longer = [sys.executable, "-m", "onefold.tools.cli.main", "train", "--resume", str(run), "--steps", "20"]
    done = subprocess.run(longer, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"resuming after step {len(losses[0])}" in done.stdout


@needs_transformers
def test_the_prompt_of_a_chat_is_that_of_the_rows(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    assert find_trained(tmp_path / "run").row_format() is None
    (tmp_path / "run/recipe.yaml").write_text("data: rows.jsonl")
    assert find_trained(tmp_path / "run").row_format() is None
    (tmp_path / "run/summary.json").write_text('{"row_formats": {"text": 1, "Alpaca": 3, "chat": 2}}')
    assert find_trained(tmp_path / "run").row_format() == "Alpaca"
    assert find_trained(tmp_path / "run/model").row_format() == "Alpaca"
    prompt, _ = read_row(row, "row 1")
    assert prompt == alpaca_prompt("Add.", "1 2")
    assert prompt.endswith("### Input:\n1 2\n\n### Response:\n")
