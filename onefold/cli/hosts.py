"""Hostfiles and the choice of hosts and slots, in DeepSpeed's formats. Pure, but for asking which host this one is."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path

Slots = tuple[int, ...]
Hosts = dict[str, Slots]

LINE = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d+)$")


class HostError(ValueError):
    """The hostfile, the choice of hosts or the place of this host in it is wrong; the message says how."""


def read_hostfile(path: str | Path) -> Hosts:
    """Hosts in the order of the file, each with slots 0 to n-1. A line reads `host1 slots=8`; `#` starts a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise HostError(f"hostfile {path}: {error.strerror or error}") from error
    hosts: Hosts = {}
    for number, line in enumerate(lines, start=1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        match = LINE.match(line)
        if match is None:
            raise HostError(f"hostfile {path}, line {number}: `{line}` is not of the form `host1 slots=8`")
        if match["host"] in hosts:
            raise HostError(f"hostfile {path}, line {number}: {match['host']} stands there twice")
        hosts[match["host"]] = tuple(range(int(match["slots"])))
    if not hosts:
        raise HostError(f"hostfile {path} names no host")
    return hosts


def parse_choice(text: str) -> dict[str, Slots | None]:
    """`host1:0,2@host2` as {host1: (0, 2), host2: None}; None stands for every slot."""
    choice: dict[str, Slots | None] = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        try:
            chosen = tuple(sorted({int(slot) for slot in slots.split(",")})) if colon else None
        except ValueError:
            raise HostError(f"`{part}` is not of the form `host1` or `host1:0,2` (several are joined by @)") from None
        if not host or host in choice:
            raise HostError(f"`{text}`: each part between @ names one host, once")
        choice[host] = chosen
    return choice


def choose(hosts: Mapping[str, Slots], include: str = "", exclude: str = "") -> Hosts:
    """The hosts and slots that stay, in the order of the hostfile."""
    if include and exclude:
        raise HostError("--include and --exclude say the same thing in two ways: give one of them")
    choice = parse_choice(include or exclude) if include or exclude else {}
    for host, slots in choice.items():
        if host not in hosts:
            raise HostError(f"{host} is not among the hosts: {', '.join(hosts)}")
        unknown = sorted(set(slots or ()) - set(hosts[host]))
        if unknown:
            raise HostError(f"{host} has no slot {unknown[0]}, only {', '.join(map(str, hosts[host]))}")
    if include:
        kept = {host: choice[host] or slots for host, slots in hosts.items() if host in choice}
    else:
        kept = dict(hosts)
        for host, slots in choice.items():
            kept[host] = tuple(slot for slot in hosts[host] if slot not in slots) if slots is not None else ()
    kept = {host: slots for host, slots in kept.items() if slots}
    if not kept:
        raise HostError("no slot is left after --include / --exclude")
    return kept


def limit(hosts: Mapping[str, Slots], num_nodes: int | None, num_slots: int | None) -> Hosts:
    """The first `num_nodes` hosts and of each the first `num_slots` slots."""
    if num_nodes is not None and num_nodes > len(hosts):
        raise HostError(f"--num_nodes {num_nodes}, but there are only {len(hosts)} hosts: {', '.join(hosts)}")
    kept = dict(list(hosts.items())[:num_nodes])
    for host, slots in kept.items():
        if num_slots is not None and num_slots > len(slots):
            raise HostError(f"--num_gpus {num_slots}, but {host} has only {len(slots)} slots")
    return {host: slots[:num_slots] for host, slots in kept.items()}


def find_this_host(hosts: Mapping[str, Slots]) -> int | None:
    """The place of this host in the list: by its name, else by an address a name stands for; None if not there."""
    own_names = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}
    for place, host in enumerate(hosts):
        if host in own_names:
            return place
    for place, host in enumerate(hosts):
        if _is_own_address(host):
            return place
    return None


def _is_own_address(host: str) -> bool:
    """A socket can be bound to an address only on the host that has it."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
