"""`onefold env`: what it says of this machine is what this machine has."""

from __future__ import annotations

import json
import os
import platform
import shutil

import torch

import onefold
from onefold import env_report
from onefold.tools.cli.main import main


def test_the_json_holds_versions_and_what_will_be_used(capsys):
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["versions", "devices", "interconnect", "host", "disk", "onefold here"]
    versions = report["versions"]
    assert (versions["onefold"], versions["torch"]) == (onefold.__version__, torch.__version__)
    assert versions["python"].startswith(platform.python_version())
    assert report["host"]["usable cores"] == str(len(os.sched_getaffinity(0)))
    assert report["disk"][os.getcwd()].endswith(f" of {shutil.disk_usage('.').total / 1e9:.1f}")
    num_gpus = torch.cuda.device_count()
    expected = f"NCCL, one rank per GPU: {num_gpus}" if num_gpus else "gloo, on the CPU"
    assert report["onefold here"]["will use"] == expected
    assert "gloo" in report["onefold here"]["backends"]


def test_the_table_says_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert env_report.main([]) == 0
    said = capsys.readouterr().out
    for value in (onefold.__version__, torch.__version__, platform.python_version()):
        assert value in said


def test_an_argument_that_nobody_knows_is_told(capsys):
    assert env_report.main(["--yaml"]) == 2
    assert "--yaml is not an option." in capsys.readouterr().err
