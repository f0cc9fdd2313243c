"""A local S3 server: moto's, in a process of its own, with a log of all requests and with faults on demand.

[Note: faults of the server]
The file `faults.json` in the folder of the server holds a list of faults, each
`{"method": ..., "path": regular expression, "fault": "hold" | "error" | "drop", "skip": number, "times": number}`.
A request that fits the first of them with `times` left is held until the client ends, answered with status 503, or
its connection is closed without an answer. `skip` requests that fit are served before.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ranks import free_port

MISSING = [name for name in ("moto", "flask", "flask_cors", "s3fs", "boto3") if find_spec(name) is None]
SKIP = f"needs a local S3 server: pip install s3fs 'moto[s3]' flask flask-cors ({', '.join(MISSING)} missing)"
BUCKET = "runs"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIDLOCALTEST", "AWS_SECRET_ACCESS_KEY": "local-secret-of-the-test",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


# Each request needs a new connection, and a thread pool that resolves the name of the server.
NEW_CONNECTIONS = {
    "FSSPEC_S3": json.dumps({"config_kwargs": {"connector_args": {"keepalive_timeout": 0, "use_dns_cache": False}}})
}


class ObjectStore:
    """A running server. Its clients find it through the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        self._process = subprocess.Popen([sys.executable, __file__, str(folder), str(self.port)])
        self._await_start()

    def _await_start(self) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / "ready").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start: exit code {self._process.poll()}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def requests(self) -> list[dict[str, Any]]:
        """All requests so far, in the order in which they came."""
        log = self.folder / "requests.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @contextmanager
    def faults(self, *faults: dict[str, Any]) -> Iterator[None]:
        self._set_faults(faults)
        try:
            yield
        finally:
            self._set_faults(())

    def _set_faults(self, faults: Iterable[dict[str, Any]]) -> None:
        part = self.folder / "faults.part"
        part.write_text(json.dumps(list(faults)))
        part.replace(self.folder / "faults.json")

    def await_held(self, count: int = 1, seconds: float = 60) -> None:
        """Wait until a request is held."""
        deadline = time.monotonic() + seconds
        while sum(request["fault"] == "hold" for request in self.requests()) < count:
            assert time.monotonic() < deadline, "no request was held"
            time.sleep(0.02)


# -- the process of the server -----------------------------------------------------------------------------------------


class FaultyServer:
    """The WSGI application: logs each request, then lets moto serve it or makes it fail."""

    def __init__(self, app: Callable[..., Any], folder: Path) -> None:
        self._app, self._folder = app, folder
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._log = (folder / "requests.jsonl").open("a", buffering=1)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = {
            "method": environ["REQUEST_METHOD"], "path": environ["PATH_INFO"], "query": environ["QUERY_STRING"],
            "range": environ.get("HTTP_RANGE"), "bytes": int(environ.get("CONTENT_LENGTH") or 0),
        }  # fmt: skip
        with self._lock:
            fault = self._fault_of(request)
            self._log.write(json.dumps({**request, "fault": fault}) + "\n")
        if fault == "hold":
            time.sleep(3600)
        if fault == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if fault == "error":
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        return self._app(environ, start_response)

    def _fault_of(self, request: dict[str, Any]) -> str | None:
        path = self._folder / "faults.json"
        text = path.read_text() if path.exists() else "[]"
        for fault in json.loads(text):
            if fault.get("method") in (None, request["method"]) and re.search(fault["path"], request["path"]):
                key = json.dumps(fault)
                self._counts[key] = self._counts.get(key, 0) + 1
                if 0 < self._counts[key] - fault.get("skip", 0) <= fault.get("times", 1 << 30):
                    return str(fault["fault"])
        return None


def serve(folder: Path, port: int) -> None:
    import logging

    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel("ERROR")
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, FaultyServer(app, folder), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(ENVIRONMENT)
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket=BUCKET)
    (folder / "ready").touch()
    while os.getppid() != 1:  # the tests were killed
        time.sleep(0.5)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
