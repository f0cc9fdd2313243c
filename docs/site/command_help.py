"""An extension of Sphinx: the directive `command-help` describes all commands of `onefold` from their parsers."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from onefold.tools.cli.commands import COMMANDS
from onefold.tools.cli.main import build_parser


class CommandHelp(Directive):
    """A section for each command: its purpose, usage, arguments and examples."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, in the order of `onefold --help`."""
        return [self._section(path) for path in COMMANDS]

    def _section(self, path: str) -> nodes.section:
        parser = _parser_of(path)
        name = f"onefold {path}"
        section = nodes.section(ids=[nodes.make_id(name)], names=[nodes.fully_normalize_name(name)])
        self.state.document.note_implicit_target(section, section)
        section += nodes.title("", "", nodes.literal("", name))
        text, _, examples = inspect.cleandoc(COMMANDS[path].add_arguments.__doc__ or "").partition("\n\nexamples:\n")
        section += _prose(text)
        usage = re.sub(r"\s+", " ", parser.format_usage()).strip()
        section += _code(textwrap.fill(usage, 88, subsequent_indent="    ", break_on_hyphens=False))
        rows = [(_invocation(action), _meaning(action)) for action in _actions(parser)]
        if rows:
            section += _table(rows)
        if examples:
            section += nodes.paragraph("", "Examples:")
            section += _code(inspect.cleandoc(examples))
        return section


def _parser_of(path: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = build_parser()
    for word in path.split():
        (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = commands.choices[word]
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        if not hidden and action.help != argparse.SUPPRESS:
            yield action


def _invocation(action: argparse.Action) -> str:
    formatter = argparse.HelpFormatter("onefold", width=1000)
    return formatter._format_action_invocation(action)


def _meaning(action: argparse.Action) -> str:
    formatter = argparse.HelpFormatter("onefold", width=1000)
    return formatter._expand_help(action) if action.help else ""


def _prose(text: str) -> list[nodes.Node]:
    blocks: list[nodes.Node] = []
    for block in text.split("\n\n"):
        if block.startswith(" "):
            blocks.append(_code(inspect.cleandoc(block)))
        else:
            blocks.append(nodes.paragraph("", "", *_inline(" ".join(block.split()))))
    return blocks


def _inline(text: str) -> list[nodes.Node]:
    parts = text.split("`")
    return [nodes.literal("", part) if place % 2 else nodes.Text(part) for place, part in enumerate(parts) if part]


def _code(text: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language="text")


def _table(rows: list[tuple[str, str]]) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (35, 65)), cols=2)
    group += nodes.thead("", _row([nodes.Text("argument")], [nodes.Text("meaning")]))
    group += nodes.tbody("", *(_row([nodes.literal("", flags)], _inline(text)) for flags, text in rows))
    return nodes.table("", group, classes=["arguments"])


def _row(*cells: list[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
