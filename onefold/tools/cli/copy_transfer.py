"""The transfer of peer copies between launchers: a server of the files of one node, and its clients.

[Note: connections between launchers]
The server sends 32 random bytes, and the client answers with 32 of its own. Both are part of the key under which each
following message is signed with the secret of the job ([Note: signed messages] in `job_secret.py`), with the direction
and the number of the message, so that none can be replayed. A request is one JSON object: a list of all files, or one
file. The server answers with JSON, and for a file with its bytes in messages of at most 4 MiB. It only reads. It opens
regular files with the names that ranks write, and no others. It closes the connection at the first message that is not
signed, too long or unknown. Nothing is encrypted.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.peer_copy import files_of, is_file_of_copy, list_copies
from onefold.job_secret import ForgedMessageError, JobSecret
from onefold.storage.place import make_private_folder, open_regular

CHUNK = 4 << 20
# A client that sends nothing for this long, or receives nothing, is disconnected. It has less time until its first
# request, whose signature shows that it belongs to the job.
_SILENT_SECONDS, _GREETING_SECONDS = 20.0, 5.0
_NONCE = 32
_LENGTH = struct.Struct("!I")
_MOST_REQUEST, _MOST_REPLY = 4096, 16 << 20
_MOST_CLIENTS = 16
# More than a signature has.
_SIGNATURE = 256

CopyFiles = dict[str, dict[str, int]]
"""The sizes of the complete files of each copy."""


class TransferError(OSError):
    """A file of a copy could not be fetched from another node."""


class _Channel:
    """Signed messages on one connection. The messages of each direction are numbered."""

    def __init__(self, connection: socket.socket, secret: JobSecret, *, is_server: bool) -> None:
        connection.settimeout(_SILENT_SECONDS)
        self._greeting_ends: float | None = time.monotonic() + _GREETING_SECONDS if is_server else None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._secret = connection, secret
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(mine)
        theirs = self._receive_exactly(_NONCE)
        first, second = (mine, theirs) if is_server else (theirs, mine)
        names = ("server", "client") if is_server else ("client", "server")
        self._keys = [f"copies/{first.hex()}/{second.hex()}/{name}" for name in names]
        self._numbers = [0, 0]

    def send(self, content: bytes) -> None:
        message = self._secret.sign(self._next_key(0), content)
        self._connection.sendall(_LENGTH.pack(len(message)))
        self._connection.sendall(message)

    def receive(self, most: int) -> bytes:
        """Return the next message. Raise if it is longer than `most`, or not signed with the secret of the job."""
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > most + _SIGNATURE:
            raise TransferError(f"a message has {length} bytes, more than the limit of {most}")
        content = self._secret.verify(self._next_key(1), self._receive_exactly(length))
        if self._greeting_ends is not None:
            self._greeting_ends = None
            self._connection.settimeout(_SILENT_SECONDS)
        return content

    def _next_key(self, direction: int) -> str:
        self._numbers[direction] += 1
        return f"{self._keys[direction]}/{self._numbers[direction]}"

    def _receive_exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            if self._greeting_ends is not None:
                self._connection.settimeout(max(0.001, self._greeting_ends - time.monotonic()))
            got = self._connection.recv_into(view[done:])
            if not got:
                raise TransferError("the connection is closed")
            done += got
        return bytes(data)


class CopyServer:
    """Serves the files of the copies of this node to the launchers of the job."""

    def __init__(self, folder: Path, secret: JobSecret, host: str) -> None:
        self._folder, self._secret = folder, secret
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._places = threading.Semaphore(_MOST_CLIENTS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="onefold-copy-server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or a client has gone, or this process has too many open files
                self._places.release()
                if self._is_closed:
                    return
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="onefold-copy-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError, ForgedMessageError, ValueError):
                channel = _Channel(connection, self._secret, is_server=True)
                while True:
                    self._answer(channel, json.loads(channel.receive(_MOST_REQUEST)))
        finally:
            self._places.release()

    def _answer(self, channel: _Channel, request: Any) -> None:
        path = request.get("file") if isinstance(request, dict) else None
        if path is None:
            listed = {name: files_of(self._folder / name) for name in list_copies(self._folder)}
            channel.send(json.dumps(listed).encode())
            return
        if not isinstance(path, str) or not is_file_of_copy(path):
            raise ValueError(f"{path!r} is no file of a copy")
        try:
            descriptor = open_regular(self._folder / path)
        except OSError:  # removed in the meantime
            channel.send(json.dumps({"bytes": None}).encode())
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            channel.send(json.dumps({"bytes": size}).encode())
            for start in range(0, size, CHUNK):
                channel.send(os.pread(file.fileno(), min(CHUNK, size - start), start))

    def close(self) -> None:
        """Accept no more clients."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class CopyClient:
    """A connection to the server of another node."""

    def __init__(self, address: tuple[str, int], secret: JobSecret) -> None:
        self._connection = socket.create_connection(address, _SILENT_SECONDS)
        try:
            self._channel = _Channel(self._connection, secret, is_server=False)
        except BaseException:
            self._connection.close()
            raise

    def list_files(self) -> CopyFiles:
        """Return the complete files of all copies of the node."""
        self._channel.send(b"{}")
        found = json.loads(self._channel.receive(_MOST_REPLY))
        return checked_files(found)

    def fetch(self, folder: Path, copy: str, file: str, size: int) -> None:
        """Copy a file of the node to the folder of this one."""
        self._channel.send(json.dumps({"file": f"{copy}/{file}"}).encode())
        found = json.loads(self._channel.receive(_MOST_REQUEST)).get("bytes")
        if found != size:
            raise TransferError(f"{copy}/{file} has {found} bytes on its node, not {size}")
        target = folder / copy / file
        make_private_folder(target.parent)
        part = target.with_name(f"{target.name}.part")
        try:
            with open(part, "wb", opener=_open_private) as written:
                for content in self._contents(size):
                    written.write(content)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)

    def _contents(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            content = self._channel.receive(CHUNK)
            if not 0 < len(content) <= left:
                raise TransferError("a file has changed while it was sent")
            left -= len(content)
            yield content

    def close(self) -> None:
        """Close the connection. A call on another thread fails."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def checked_files(found: Any) -> CopyFiles:
    """Return a list of files that another launcher has sent. Raise a TransferError if it is none."""
    if not isinstance(found, dict) or not all(isinstance(files, dict) for files in found.values()):
        raise TransferError("the list of files is not one of a launcher of onefold")
    for copy, files in found.items():
        for file, size in files.items():
            if not is_file_of_copy(f"{copy}/{file}") or type(size) is not int or size < 0:
                raise TransferError(f"{copy}/{file}: not a file of a copy")
    return dict(found)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
