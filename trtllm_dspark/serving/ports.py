# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports: the wanted ones where they are free, others where they are not."""

from __future__ import annotations

import socket
from dataclasses import dataclass, fields

from trtllm_dspark.errors import ConfigError


@dataclass(frozen=True)
class Ports:
    """The three ports of a server; 0 = any free one."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < 65536:
                raise ConfigError(
                    f"{field.name} port {value} is not allowed: it must be 0 to 65535"
                )


def choose_ports(wanted: Ports, host: str = "0.0.0.0") -> tuple[Ports, list[str]]:
    """Ports that are free now, and one line for each that had to be replaced."""
    held: list[socket.socket] = []
    chosen: dict[str, int] = {}
    notes: list[str] = []
    try:
        for field in fields(wanted):
            port = getattr(wanted, field.name)
            sock = _bind(host, port) or _bind(host, 0)
            if sock is None:
                raise ConfigError(f"no port can be opened on {host}: is the address right?")
            held.append(sock)
            chosen[field.name] = sock.getsockname()[1]
            if port not in (0, chosen[field.name]):
                notes.append(f"{field.name} port {port} is taken: using {chosen[field.name]}")
    finally:
        for sock in held:
            sock.close()
    return Ports(**chosen), notes


def _bind(host: str, port: int) -> socket.socket | None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1)
    except OSError:
        sock.close()
        return None
    return sock
