"""The tutorials: the commands of their pages run, print what the pages show, and draw the pictures."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from test_guide import blocks, check_printed, commands, run

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/tutorials"
IMAGES = ROOT / "docs/images/tutorials"

pytestmark = pytest.mark.program


def follow(page: str, folder: Path) -> dict[str, list[str]]:
    """Run all commands of a page in a folder, and return the lines that each printed."""
    (folder / "examples").symlink_to(ROOT / "examples")
    printed = {}
    for each in blocks("console", (PAGES / page).read_text()):
        for command, said in commands(each.body):
            printed[command] = run(command, folder, fails=each.name == "fails")
            check_printed(command, said, printed[command])
    assert printed
    return printed


def assert_draws(page: str, folder: Path) -> None:
    """Check that the pictures of a page are in the folder of a run."""
    shown = re.findall(r"images/tutorials/(\S+?)\)", (PAGES / page).read_text())
    assert shown
    assert all((folder / name).exists() for name in shown), shown


def test_every_file_has_a_page_and_every_picture_is_shown():
    pages = {path.stem.replace("-", "_"): path.read_text() for path in PAGES.glob("*.md")}
    files = {path.stem for path in (ROOT / "examples/tutorials").glob("*.py")}
    assert set(pages) == files
    shown = {name for text in pages.values() for name in re.findall(r"\]\(\.\./images/tutorials/(\S+?)\)", text)}
    assert shown == {path.name for path in IMAGES.iterdir()}


@pytest.mark.slow
def test_zero_stages(tmp_path):
    pytest.importorskip("matplotlib")
    (lines,) = follow("zero-stages.md", tmp_path).values()
    rows = [line.split() for line in lines if re.match(r" +[12] +[0-3] ", line)]
    assert len(rows) == 8
    losses = {(int(row[0]), int(row[1])): float(row[-1]) for row in rows}
    assert len({losses[1, stage] for stage in range(4)}) == 1
    total = {(int(row[0]), int(row[1])): float(row[6]) for row in rows}
    assert total[2, 0] > total[2, 1] > total[2, 2] > total[2, 3]
    assert total[1, 1] == pytest.approx(total[1, 2])
    assert all((tmp_path / f"runs/zero-stages/zero-stages-{name}.png").exists() for name in ("memory", "traffic"))


@pytest.mark.slow
def test_offload(tmp_path):
    pytest.importorskip("matplotlib")
    (lines,) = follow("offload.md", tmp_path).values()
    names = ("no offload", "ratio 0.5", "all states", "both in memory", "both on disk")
    (head,) = [line for line in lines if line.startswith("setting")]
    rows = {name: line.removeprefix(name).split() for line in lines for name in names if line.startswith(name)}
    assert list(rows) == list(names)
    assert head.split("  ")[-1] == "last loss"
    assert len({row[-1] for row in rows.values()}) == 1
    device = [float(row[0]) for row in rows.values()]
    assert device == sorted(device, reverse=True)
    assert_draws("offload.md", tmp_path / "runs/offload")


@pytest.mark.slow
def test_fine_tune(tmp_path):
    for package in ("matplotlib", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    *_, compared = follow("fine-tune.md", tmp_path).values()
    total = {row[0]: float(row[5]) for line in compared if (row := line.split())[0] in ("full", "lora", "qlora")}
    assert total["full"] > 3 * total["lora"] > 3 * total["qlora"]
    assert_draws("fine-tune.md", tmp_path / "runs/fine-tune")


@pytest.mark.slow
def test_long_sequences(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    (lines,) = follow("long-sequences.md", tmp_path).values()
    pattern = re.compile(r"^([^\d\n]+?) +(\d+)((?: +[\d.]+){4})  ([\d.]+)$", re.MULTILINE)

    def rows_of(text: str) -> dict[tuple[str, int], list[float]]:
        return {
            (name, int(length)): [*map(float, sizes.split()), float(loss)]
            for name, length, sizes, loss in pattern.findall(text)
        }

    rows = rows_of("\n".join(lines))
    shown = rows_of((PAGES / "long-sequences.md").read_text())
    assert shown.keys() == rows.keys()
    assert all(row == pytest.approx(shown[place], rel=0.05) for place, row in rows.items())
    assert len(rows) == 12
    for length in (256, 512, 1024):
        whole, tiled, divided, both = (rows[name, length] for name in dict.fromkeys(name for name, _ in rows))
        assert both[0] < tiled[0] < divided[0] < whole[0]
        assert [row[-1] for row in (tiled, divided, both)] == pytest.approx(3 * [whole[-1]], abs=2e-5)
        assert divided[3] > whole[3] == 0
    assert_draws("long-sequences.md", tmp_path / "runs/long-sequences")


@pytest.mark.slow
def test_fp8(tmp_path):
    pytest.importorskip("matplotlib")
    (lines,) = follow("fp8.md", tmp_path).values()
    bf16, tensor, row = ([*map(float, line.split()[-4:])] for line in lines if line.startswith(("bf16", "FP8,")))
    assert tensor[3] == pytest.approx(bf16[3], rel=0.01)
    assert row[3] == pytest.approx(bf16[3], rel=0.01)
    assert len({tensor[2], row[2], bf16[2]}) == 3, "FP8 has changed nothing"
    assert_draws("fp8.md", tmp_path / "runs/fp8")


@pytest.mark.slow
def test_experts(tmp_path):
    pytest.importorskip("matplotlib")
    (lines,) = follow("experts.md", tmp_path).values()
    found = [[*map(float, line.split())] for line in lines if re.match(r" +[12] ", line)]
    alone, together = ([row for row in found if row[0] == size] for size in (1, 2))
    assert [row[1] for row in alone] == [row[1] for row in together] == [256, 512, 1024, 2048]
    assert len({row[5] for row in alone}) == 1
    assert together[0][5] < alone[0][5] < together[-1][5]
    assert [row[-1] for row in together] == pytest.approx([row[-1] for row in alone], abs=1e-4)
    assert_draws("experts.md", tmp_path / "runs/experts")


@pytest.mark.slow
def test_dpo(tmp_path):
    for package in ("matplotlib", "peft", "trl"):
        pytest.importorskip(package)
    *_, compared = follow("dpo.md", tmp_path).values()
    held = {row[0]: (float(row[1]), float(row[2])) for line in compared if (row := line.split())[0] in ("full", "lora")}
    assert held["full"][1] == pytest.approx(held["full"][0] / 3, rel=0.01)
    assert held["lora"][1] == 0
    assert_draws("dpo.md", tmp_path / "runs/dpo")


@pytest.mark.slow
def test_resume(tmp_path):
    pytest.importorskip("matplotlib")
    printed = follow("resume.md", tmp_path)
    *_, compared = printed.values()
    (other,) = [line for line in compared if line.startswith("other")]
    assert 0 < float(other.split()[-1]) < 1e-2
    assert math.isfinite(float(other.split()[-1]))
    assert (tmp_path / "runs/resume.png").exists()


@pytest.mark.slow
def test_report(tmp_path):
    pytest.importorskip("matplotlib")
    follow("report.md", tmp_path)
    assert_draws("report.md", tmp_path / "runs/report")
