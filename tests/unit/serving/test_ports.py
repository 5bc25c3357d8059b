# SPDX-License-Identifier: Apache-2.0
"""Wanted ports are taken where they are free; others are chosen and said where they are not."""

from __future__ import annotations

import socket

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.serving.ports import Ports, choose_ports


def test_any_port_gives_three_different_ones_without_a_note() -> None:
    ports, notes = choose_ports(Ports(0, 0, 0), "127.0.0.1")
    assert len({ports.http, ports.grpc, ports.metrics}) == 3 and notes == []


def test_a_taken_port_is_replaced_and_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        ports, notes = choose_ports(Ports(http=port, grpc=0, metrics=0), "127.0.0.1")
    assert ports.http != port
    assert notes == [f"http port {port} is taken: using {ports.http}"]


def test_a_port_that_is_wanted_twice_is_given_once() -> None:
    free, _ = choose_ports(Ports(0, 0, 0), "127.0.0.1")
    ports, notes = choose_ports(Ports(free.http, free.http, 0), "127.0.0.1")
    assert ports.http == free.http != ports.grpc and len(notes) == 1


def test_impossible_ports_are_refused() -> None:
    with pytest.raises(ConfigError, match="grpc port 70000 is not allowed"):
        Ports(grpc=70000)
