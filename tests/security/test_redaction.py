"""Secrets of the environment, and credentials in URLs, are in no log, error, record or report."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import COMMAND, MarkedJob, marked_job

from onefold.config import ConfigError, load_config
from onefold.log import logger
from onefold.redaction import HIDDEN, is_secret_name, redact, redact_command
from onefold.tools.env_report import collect

SECRET = "s3cr3t-value-of-the-user"
# Names under which tools keep their secrets.
NAMES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_PAT",
    "COMET_API_KEY", "OPENAI_API_KEY", "MYSQL_PWD", "PGPASSWORD", "DB_PASSWD", "SSH_PASSPHRASE", "GCP_CREDENTIALS",
    "AZURE_CLIENT_SECRET", "SENTRY_DSN", "ONEFOLD_JOB_SECRET", "my_secret", "MLFLOW_TRACKING_PASSWORD", "NGC_APIKEY",
)  # fmt: skip
OTHERS = (
    "PWD", "OLDPWD", "PATH", "HOME", "TOKENIZERS_PARALLELISM", "MASTER_ADDR", "KEYBOARD", "MONKEYPATCH", "NCCL_DEBUG",
    "ONEFOLD_JOB_SECRET_FILE", "SSH_AUTH_SOCK", "RANK",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)
    assert redact(f"a {SECRET}, b", {name: SECRET}) == f"a {HIDDEN}, b"


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)
    assert redact(f"a {SECRET}", {name: SECRET}) == f"a {SECRET}"


@given(st.text(), st.text(min_size=8).filter(lambda text: len(text.strip()) >= 8), st.text())
def test_no_text_contains_the_value_of_a_secret(before: str, secret: str, after: str) -> None:
    assert secret.strip() not in redact(f"{before}{secret}{after}", {"A_TOKEN": secret}).replace(HIDDEN, "\0")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("s3://user:pass@host/path", "s3://***@host/path"),
        ("https://token@github.com/a.git failed", "https://***@github.com/a.git failed"),
        ("redis://:p%40ss@host:1", "redis://***@host:1"),
        ("https://host/a?X-Amz-Signature=abc&b=c", "https://host/a?X-Amz-Signature=***&b=c"),
        ("https://host/a?b=c&access_token=abc", "https://host/a?b=c&access_token=***"),
        ("https://host/a@b and mail@host", "https://host/a@b and mail@host"),
        ("rank 1 (node a, pid 2) failed: x == y", "rank 1 (node a, pid 2) failed: x == y"),
        ("token = tokenizer.decode(key=1)", "token = tokenizer.decode(key=1)"),
    ],
)
def test_credentials_of_urls_are_removed(text: str, left: str) -> None:
    assert redact(text, {}) == left


def test_options_with_secrets_are_removed_from_commands() -> None:
    given = ["train.py", "--api_key", "abc", "--hf-token=def", "--lr", "0.1", "--password", "--key_size", "4", "-x"]
    left = ["train.py", "--api_key", "***", "--hf-token=***", "--lr", "0.1", "--password", "--key_size", "***", "-x"]
    assert redact_command(given) == left


def test_the_log_has_no_secrets(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with caplog.at_level(logging.INFO, "onefold"):
        logger.warning("a message with %s and %d", SECRET, 3)
        try:
            raise ValueError(f"an error with {SECRET}")
        except ValueError:
            logger.exception("it failed")
    assert SECRET not in caplog.text
    assert "a message with *** and 3" in caplog.text
    assert "ValueError: an error with ***" in caplog.text


@pytest.mark.parametrize("comet", [{"api_key": SECRET}, {"enabled": True, "api_key": [SECRET]}])
def test_the_key_of_a_monitor_is_in_no_message(comet: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    text = ""
    try:
        config = load_config({"train_micro_batch_size_per_gpu": 1, "comet": comet})
        text = f"{config.comet!r} {config.notices} {config.refusals}"
    except ConfigError as error:
        text = str(error)
    assert "api_key" in text
    assert SECRET not in text + caplog.text


# -- programs --------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch, onefold
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
          "onefold": {"report": sys.argv[1] + "/run", 
                      "trace": {"path": sys.argv[1] + "/trace.json", "steps": [1, 2]}}}
engine = onefold.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
engine.save_checkpoint(sys.argv[1] + "/checkpoints")
engine.close()
raise RuntimeError("cannot reach https://user:hunter22@host with " + os.environ["WANDB_API_KEY"])
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.program
def test_nothing_that_a_job_writes_or_prints_has_a_secret(job: MarkedJob) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "ONEFOLD_JOB_SECRET")
    secrets = {name: f"{SECRET}-{number}" for number, name in enumerate(names)}
    (job.folder / "script.py").write_text(SCRIPT)
    launcher = job.launch("--nproc", "2", str(job.folder / "script.py"), str(job.folder / "out"), **secrets)
    stdout, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 1, stderr
    assert "RuntimeError: cannot reach https://***@host with ***" in stderr
    written = [path for path in (job.folder / "out").rglob("*") if path.is_file()]
    assert {"run.jsonl", "latest"} <= {path.name for path in written}
    assert any(path.name.startswith("trace") for path in written)
    for text in (stdout, stderr, *(path.read_bytes().decode(errors="replace") for path in written)):
        assert SECRET not in text
        assert "hunter22" not in text


def test_the_report_about_the_machine_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    text = json.dumps(collect())
    assert "torch" in text
    assert SECRET not in text


@pytest.mark.program
def test_errors_of_commands_have_no_secret(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_TOKEN": SECRET}
    hosts = tmp_path / "hosts"
    hosts.write_text(f"node1 slots={SECRET}\n")
    command = [*COMMAND, "launch", "--hostfile", str(hosts), sys.executable]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "`node1 slots=***` is not of the form" in done.stderr
    hosts.write_text("203.0.113.7 slots=1\n203.0.113.8 slots=1\n")
    command = [*COMMAND, "launch", "--hostfile", str(hosts), sys.executable, "--api_key", "abcdefgh", SECRET]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "onefold launch --node_rank 1" in done.stderr
    assert "abcdefgh" not in done.stderr
    assert SECRET not in done.stderr


def test_the_source_prints_no_whole_environment() -> None:
    """`os.environ` is read by name, given to child processes, or searched for secrets; it is formatted nowhere."""
    package = Path(__file__).parents[2] / "onefold"
    formatted = ("{os.environ}", "dict(os.environ)", "json.dumps(os.environ", "str(os.environ", "repr(os.environ")
    found = [(path.name, text) for path in package.rglob("*.py") for text in formatted if text in path.read_text()]
    assert found == [], json.dumps(found)
