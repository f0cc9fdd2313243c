"""Run `onefold merge` and `onefold chat`: use a model or an adapter that `onefold train` has saved."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onefold.tools.cli.terminal import fails_on
from onefold.tools.cli.usage import UsageError, loading_torch
from onefold.tools.train.options import SUMMARY
from onefold.tools.train.recipe import RECIPE, read_recipe
from onefold.tools.train.rows import CONVERSATIONS, alpaca_prompt

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class _Trained:
    """A model on disk, and the adapter for it, if there is one."""

    model: Path
    adapter: Path | None
    run: Path | None
    """The folder of the run of `onefold train` that saved it."""

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer."""
        return self.adapter or self.model

    def row_format(self) -> str | None:
        """Return the format of most rows that the model was trained on. None if it is not known."""
        if self.run is None or not (self.run / SUMMARY).is_file():
            return None
        formats = json.loads((self.run / SUMMARY).read_text()).get("row_formats") or {}
        return max(formats, key=lambda name: int(formats[name]), default=None)


def find_trained(folder: Path) -> _Trained:
    """Return the model in a folder of a run, of an adapter or of transformers."""
    for package in ("transformers", "peft"):
        if find_spec(package) is None:
            raise UsageError(f"{package} is missing. Run pip install 'onefold[huggingface]'.")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    recipe = next((path for path in (folder / RECIPE, folder.parent / RECIPE) if path.is_file()), None)
    run = recipe.parent if recipe is not None else None
    found = next((inside for inside in (folder, folder / "adapter", folder / "model") if _has_model(inside)), None)
    if found is None:
        gpt = (folder / "model" / "model.safetensors").is_file()
        raise UsageError(
            f"{folder}: the built-in GPT is not a model of transformers. Train with --model."
            if gpt
            else f"{folder}: no model. Give the folder of a run of onefold train --model, or a model of transformers."
        )
    if not (found / _ADAPTER_CONFIG).is_file():
        return _Trained(found, None, run)
    recorded = getattr(read_recipe(recipe), "model", None) if recipe is not None else None
    base = Path(recorded or json.loads((found / _ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    if not base.is_dir():
        raise UsageError(f"{found}: the model of this adapter, {base}, is not there. Move it back.")
    return _Trained(base, found, run)


def _has_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_ADAPTER_CONFIG, "config.json"))


@fails_on(OSError)
def merge(options: argparse.Namespace) -> int:
    """Run `onefold merge`."""
    folder = Path(options.folder)
    trained, out = find_trained(folder), Path(options.out or folder / "merged")
    if trained.adapter is None:
        raise UsageError(f"{folder}: no adapter to merge. The folder {trained.model} has the whole model.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: the folder is not empty. Give another --out.")
    if "quantization_config" in json.loads((trained.model / "config.json").read_text()):
        raise UsageError(
            f"{trained.model}: the files of the model are quantized, and merging would round its weights again. Load "
            "the model with the adapter, or merge into the files that it was quantized from."
        )
    with loading_torch():
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
    model: Any = AutoModelForCausalLM.from_pretrained(trained.model, dtype="auto")
    merged = PeftModel.from_pretrained(model, str(trained.adapter)).merge_and_unload(safe_merge=True)
    merged.save_pretrained(out)
    if _has_tokenizer(trained.tokenizer):
        AutoTokenizer.from_pretrained(trained.tokenizer).save_pretrained(out)
    print(f"the merged model is in {out}")
    return 0


@fails_on(OSError)
def chat(options: argparse.Namespace) -> int:
    """Run `onefold chat`."""
    trained = find_trained(Path(options.folder))
    if not _has_tokenizer(trained.tokenizer):
        raise UsageError(f"{trained.tokenizer}: no tokenizer. Save it next to the weights.")
    with loading_torch():
        dialog = _Dialog(trained, options)
    if options.prompt is not None:
        print(dialog.answer(options.prompt))
        return 0
    print(f"{dialog.describe()}. An empty line begins a new conversation, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line:
            print(dialog.answer(line), flush=True)
        else:
            dialog.forget()


class _Dialog:
    """A conversation with a model, in the format of its training data."""

    def __init__(self, trained: _Trained, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._options, device = options, "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(trained.tokenizer)
        model: Any = AutoModelForCausalLM.from_pretrained(trained.model, dtype="auto")
        if trained.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(trained.adapter))
        self._model = (model if getattr(model, "is_quantized", False) else model.to(device)).eval()
        self._messages: list[dict[str, str]] = []
        has_template = self._tokenizer.chat_template is not None
        row_format = trained.row_format()
        is_chat = has_template and row_format in (None, *CONVERSATIONS)
        self._format = "chat" if is_chat else row_format if row_format in ("Alpaca", "prompts") else "text"
        torch.manual_seed(options.seed)

    def describe(self) -> str:
        """Describe how input is passed to the model."""
        return {
            "Alpaca": "each line is an instruction in Alpaca's prompt",
            "chat": "each line is a turn, in the chat template of the model",
            "prompts": "each line is a prompt, without a chat template, as in the training data",
            "text": "each line is continued, without a chat template",
        }[self._format]

    def forget(self) -> None:
        """Begin a new conversation."""
        self._messages = []

    def answer(self, line: str) -> str:
        """Return the model's answer to a line."""
        if self._format == "chat":
            self._messages.append({"role": "user", "content": line})
            encoded = self._tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = self._tokenizer(alpaca_prompt(line) if self._format == "Alpaca" else line, return_tensors="pt")
        end, options = self._tokenizer.eos_token_id, self._options
        ids = encoded["input_ids"].to(self._model.device)
        if ids.shape[1] == 0:
            raise UsageError(f"the tokenizer makes no token of {line!r}. Give more text.")
        temperature = {"temperature": options.temperature} if options.temperature else {}
        written = self._model.generate(
            input_ids=ids,
            attention_mask=encoded["attention_mask"].to(ids.device),
            max_new_tokens=options.max_tokens,
            pad_token_id=end if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id,
            do_sample=bool(temperature),
            **temperature,
        )
        text: str = self._tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip()
        self._messages.append({"role": "assistant", "content": text})
        return text


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
