"""The address at which the server of a store listens."""

from __future__ import annotations

import ipaddress
import socket


def listen_at(host: str, port: int) -> int | None:
    """Return a listening socket at this address.

    Return None if the address does not belong to this node, or is a name, which nodes may resolve differently.
    """
    address = _address(host)
    if address is None:
        return None
    found = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((str(address), port))
        found.listen(2048)
        return found.detach()
    except OSError:
        found.close()
        return None


def is_own_address(host: str) -> bool:
    """Return whether `host` is an address, not a name, and belongs to this node."""
    address = _address(host)
    if address is None:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
        return True


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
