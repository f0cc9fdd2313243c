"""Metrics of a run over HTTP: format, addresses, and the end of the server."""

from __future__ import annotations

import gc
import re
import socket
import urllib.error
import urllib.request

import pytest
from models import batches, config, net, start

from onefold.config import ConfigError
from onefold.report.metrics_server import MetricsServer

EVENTS = [
    ("Train/Samples/train_loss", 2.5, 64),
    ("onefold/memory/held_cpu", 10, 64),
    ("onefold/traffic/all-gather", 8, 64),
]


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def test_the_latest_values_are_served():
    server = MetricsServer("127.0.0.1:0")
    assert get(server.port) == ""
    server.write_events(EVENTS)
    server.write_events([("Train/Samples/train_loss", 1.5, 128), ("Train/Samples/lr", float("nan"), 128)])
    values = dict(line.split() for line in get(server.port).splitlines() if not line.startswith("#"))
    assert float(values.pop("onefold_last_step_timestamp_seconds")) > 1e9
    assert values == {
        "onefold_train_loss": "1.5", "onefold_lr": "nan", "onefold_samples": "128", "onefold_memory_held_cpu": "10.0",
        "onefold_traffic_all_gather": "8.0",
    }  # fmt: skip
    for line in get(server.port, "/metrics?name=x").splitlines():
        assert re.fullmatch(r"# TYPE [a-z_]+ gauge|[a-z_]+ \S+", line)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server.port, "/")
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server.port)


@pytest.mark.parametrize(
    "address", ["9400", ":9400", "localhost:", "localhost:http", "localhost:70000", "256.0.0.1:9400"]
)
def test_addresses_that_cannot_be_used_are_named(address):
    with pytest.raises(ConfigError, match=r"onefold.metrics_address = '.*host:port|Use an address of the first"):
        MetricsServer(address)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="a port that no other process uses"):
            MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}")


def metrics_of_a_run() -> list[str]:
    engine = start(net(), config(2, onefold={"metrics_address": "127.0.0.1:0"}))
    for x, y in batches(3):
        engine.backward(engine(x, y))
        engine.step()
    server = engine.monitor.metrics_server
    if server is None:
        return []
    port, found = server.port, []
    found = [line.split()[0] for line in get(port).splitlines() if not line.startswith("#")]
    engine.destroy()
    del engine, server
    gc.collect()
    with pytest.raises(urllib.error.URLError):
        get(port)
    return found


def test_a_run_serves_its_metrics_from_the_first_rank(on_ranks):
    first, second = on_ranks(2, metrics_of_a_run)
    assert {"onefold_train_loss", "onefold_lr", "onefold_grad_norm", "onefold_samples"} <= set(first)
    assert second == []
