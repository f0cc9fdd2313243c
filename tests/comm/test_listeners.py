"""Who listens where: nothing but the job's own interface is open to others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.program

TESTS = Path(__file__).parents[1]
# Addresses at which this process listens, from /proc; sockets of gloo among them.
SCRIPT = """
import json, os, sys
import torch
import onefold

def listening():
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink("/proc/self/fd/" + name))
        except FileNotFoundError:
            pass
    found = []
    for table in ("tcp", "tcp6"):
        with open("/proc/net/" + table) as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    found.append(words[1].split(":")[0])
    return sorted(set(found))

model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "log_level": "error"}
engine = onefold.initialize(model=model, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
with open(os.path.join(sys.argv[1], f"rank{engine.global_rank}.json"), "w") as out:
    json.dump(listening(), out)
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def addresses(folder: Path, *command: str) -> list[set[str]]:
    script = folder / "job.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *command, str(script), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("onefold: starting")] == []
    return [set(json.loads(path.read_text())) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_one_rank_and_launched_ranks_listen_on_loopback_only(tmp_path):
    (alone,) = addresses(tmp_path, "-W", "error")
    assert alone <= LOOPBACK
    for found in addresses(tmp_path, "-m", "onefold.tools.cli.main", "launch", "--nproc", "2"):
        assert found
        assert found <= LOOPBACK
