"""Two hosts: network namespaces joined by a virtual cable, one launcher in each, one training job over both.

The cable is cut during a job with MIN:MAX nodes. No process sees the end of a connection then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import marked_job, wait_until

pytestmark = pytest.mark.program

TESTS = Path(__file__).parents[1]
SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
torch.set_num_threads(1)
import onefold
from models import config, net, start, train
onefold.init_distributed()
engine = start(net(), config(2, zero_optimization={{"overlap_comm": True}}))
trace = train(engine, 3)
total = sum(weight.double().sum().item() for weight in trace.weights.values())
with open(os.path.join(sys.argv[1], f"rank{{engine.global_rank}}.json"), "w") as out:
    json.dump({{"losses": trace.losses, "norms": trace.norms, "weights": total, "world": engine.world_size}}, out)
torch.distributed.destroy_process_group()
"""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine allows no network namespaces: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, address, interface) of two hosts that reach each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("needs the `ip` command of iproute2")
    mark = uuid.uuid4().hex[:6]
    found = [(f"onefold-{mark}-{index}", f"10.213.7.{index + 1}", f"of{mark}{index}") for index in (0, 1)]
    try:
        for namespace, _, _ in found:
            ip("netns", "add", namespace)
        ip("link", "add", found[0][2], "netns", found[0][0], "type", "veth", "peer", found[1][2], "netns", found[1][0])
        for namespace, address, interface in found:
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield found
    finally:
        for namespace, _, _ in found:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def results(folder: Path) -> list[dict[str, object]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_a_job_over_two_hosts_equals_one_on_a_single_host(hosts, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    alone, joined = tmp_path / "alone", tmp_path / "joined"
    alone.mkdir()
    joined.mkdir()
    launch = [sys.executable, "-m", "onefold.tools.cli.main", "launch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, "--nproc", "2", str(script), str(alone)], env=environment, timeout=120, check=True)

    nodes = []
    for index, (namespace, _, interface) in enumerate(hosts):
        command = ["ip", "netns", "exec", namespace, *launch, "--nproc", "1", "--num_nodes", "2"]
        command += ["--node_rank", str(index), "--master_addr", hosts[0][1], str(script), str(joined)]
        nodes.append(subprocess.Popen(command, env={**environment, "GLOO_SOCKET_IFNAME": interface}))
    try:
        assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert results(joined) == results(alone)
    assert results(joined)[0]["world"] == 2


@pytest.mark.slow
def test_the_job_continues_without_a_host_that_is_cut_off(hosts, tmp_path):
    """The host of the store continues alone. The launcher of the other one ends its rank, and says why."""
    options = {"folder": str(tmp_path), "steps": 6, "pause": [0, 4], "save_every": 2}
    script = str(Path(__file__).parent / "elastic_script.py")
    flags = ["--nproc", "1", "--nnodes", "1:2", "--max-restarts", "2", "--master_addr", hosts[0][1]]
    with marked_job(tmp_path) as job:
        nodes = []
        for namespace, _, interface in hosts:
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "onefold.tools.cli.main", "launch"]
            command += [*flags, script, json.dumps(options)]
            nodes.append(job.start(command, GLOO_SOCKET_IFNAME=interface))
        wait_until(lambda: len(list(tmp_path.glob("paused.*"))) == 2)
        ip("-n", hosts[1][0], "link", "set", hosts[1][2], "down")
        (tmp_path / "go").touch()
        _, stderr = nodes[0].communicate(timeout=120)
        assert nodes[0].returncode == 0, stderr
        assert "onefold: restarting all ranks on 1 node, restart 1 of 2" in stderr
        _, stderr = nodes[1].communicate(timeout=120)
        assert nodes[1].returncode == 1
        assert f"onefold: the store of the job at {hosts[0][1]}:29500 does not reply" in stderr
        job.wait_until_gone()
    lines = [line.split()[:3] for line in (tmp_path / "steps").read_text().splitlines()]
    assert lines == [["0", str(step), "2"] for step in (1, 2, 3)] + [["1", str(step), "1"] for step in (3, 4, 5, 6)]
