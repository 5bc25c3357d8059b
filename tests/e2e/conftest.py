# SPDX-License-Identifier: Apache-2.0
"""One real server on a tiny random model for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import wait_idle
from tests.e2e.tiny_model import write_tiny_model
from trtllm_dspark.config import BucketConfig, SchedulerConfig, SystemConfig
from trtllm_dspark.serving.client import GrpcClient
from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import RepositoryOptions
from trtllm_dspark.serving.server import running_server

MAX_NUM_REQUESTS = 8


def tiny_config(
    model_dir: Path, max_num_requests: int = MAX_NUM_REQUESTS, queue: int = 0
) -> SystemConfig:
    """A small system that drafts by look-up and verifies every draft."""
    return SystemConfig(
        model_dir=str(model_dir),
        drafter="ngram",
        dtype="float32",
        num_threads=1,
        max_seq_len=8192,
        max_queue_size=queue,
        buckets=BucketConfig(
            max_num_requests=max_num_requests, max_num_tokens=128, request_buckets=(1, 4, 8)
        ),
        scheduler=SchedulerConfig(policy="fixed"),
        profile="never",
    )


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def session_server(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with running_server(
        tiny_config(model_dir),
        ports=Ports(0, 0, 0),
        host="127.0.0.1",
        options=RepositoryOptions(drain_timeout_s=10),
        work_dir=tmp_path_factory.mktemp("server"),
    ) as server:
        yield server


@pytest.fixture
def server(session_server: TritonServer) -> Iterator[TritonServer]:
    """The session's server; after each test it must be ready and hold no page and no slot."""
    yield session_server
    assert session_server.is_ready()
    wait_idle(session_server)


@pytest.fixture
def client(server: TritonServer) -> Iterator[GrpcClient]:
    with GrpcClient(server.grpc_url) as client:
        yield client
