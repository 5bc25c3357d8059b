# SPDX-License-Identifier: Apache-2.0
"""Start, full queue, drain and death of a real server."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient

from tests.e2e.conftest import tiny_config
from tests.e2e.support import metrics, running, wait_until
from trtllm_dspark.errors import ServerError
from trtllm_dspark.serving.client import Answer, GrpcClient
from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import RepositoryOptions, render_repository
from trtllm_dspark.serving.server import running_server


def children(pid: int) -> list[int]:
    """Processes that `pid` started (its model processes)."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(p) for p in path.read_text().split()] if path.exists() else []
    return found or [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _parent(int(entry.name)) == pid
    ]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_queue_and_a_drain(model_dir: Path, tmp_path: Path) -> None:
    """One server with one slot and a queue of one: refused when full; SIGTERM lets
    what runs finish, ends every process, and the exit code is 0."""
    config = tiny_config(model_dir, max_num_requests=1, queue=1)
    options = RepositoryOptions(drain_timeout_s=60)
    with (
        running_server(
            config, ports=Ports(0, 0, 0), host="127.0.0.1", options=options, work_dir=tmp_path
        ) as server,
        GrpcClient(server.grpc_url) as client,
    ):
        models = children(server.pid)
        assert len(models) == 5
        answers: list[Answer] = []

        def ask(number: int) -> None:
            body = {"text_input": "hi", "max_tokens": 3000, "stream": True}
            answers.append(client.ask(body, model=("ensemble", "tensorrt_llm_bls")[number]))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(2)]
        threads[0].start()
        wait_until(lambda: running(server) == 1, "one running request")
        threads[1].start()
        wait_until(lambda: metrics(server).total("dspark_waiting_requests") == 1, "one waits")
        refused = client.ask({"text_input": "x", "max_tokens": 2})
        assert "max_queue_size is 1" in (refused.error or "")
        os.kill(server.pid, signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert [(a.error, a.finish_reason) for a in answers] == [(None, "length")] * 2
        assert server.wait(60) == 0
        wait_until(lambda: not any(is_alive(pid) for pid in models), "every model process gone")


def test_without_decoupling_unary_calls_run_side_by_side(model_dir: Path, tmp_path: Path) -> None:
    with running_server(
        tiny_config(model_dir),
        ports=Ports(0, 0, 0),
        host="127.0.0.1",
        options=RepositoryOptions(decoupled=False),
        work_dir=tmp_path,
    ) as server:
        url = server.grpc_url
        with tritonclient.InferenceServerClient(url) as client:
            futures: list[queue.Queue[Any]] = [queue.Queue() for _ in range(4)]
            for number, future in enumerate(futures):
                client.async_infer(
                    ("ensemble", "tensorrt_llm_bls")[number % 2],
                    unary_inputs(stream=number == 3),
                    lambda result, error, future=future: future.put(error or result),
                )
            *results, refused = [future.get(timeout=60) for future in futures]
            texts = {bytes(result.as_numpy("text_output")[0]) for result in results}
            assert len(texts) == 1 and len(texts.pop()) >= 16
            assert refused.status() == "StatusCode.INVALID_ARGUMENT"
            assert "decoupled_mode false" in refused.message()


def unary_inputs(stream: bool) -> list[Any]:
    inputs = []
    for name, array, datatype in (
        ("text_input", np.array([[b"hello"]], object), "BYTES"),
        ("max_tokens", np.array([[16]], np.int32), "INT32"),
        ("stream", np.array([[stream]]), "BOOL"),
    ):
        inputs.append(tritonclient.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def test_a_model_that_cannot_load_fails_the_start_and_says_why(
    model_dir: Path, tmp_path: Path
) -> None:
    repository = render_repository(tiny_config(model_dir), tmp_path / "models")
    (repository / "tensorrt_llm" / "dspark_config.json").write_text('{"model_dir": "/nowhere"}')
    server = TritonServer(repository, ports=Ports(0, 0, 0), host="127.0.0.1", work_dir=tmp_path)
    with pytest.raises(ServerError, match=r"ended with code 1 before it was ready.*") as caught:
        server.start(120)
    assert "/nowhere" in str(caught.value)


OWNER = """
import sys
from pathlib import Path
from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.ports import Ports
server = TritonServer(Path(sys.argv[1]), ports=Ports(0, 0, 0), host="127.0.0.1",
                      work_dir=Path(sys.argv[2]), exit_timeout_s=5)
server.start(120)
print(server.pid, flush=True)
server.wait()
"""


def test_a_killed_owner_leaves_no_server_behind(model_dir: Path, tmp_path: Path) -> None:
    repository = render_repository(tiny_config(model_dir), tmp_path / "models")
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing"):
        for path in sorted((repository / model).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (repository / model).rmdir()
    command = [sys.executable, "-c", OWNER, str(repository), str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        processes = [pid, *children(pid)]
        assert len(processes) == 2
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(p) for p in processes), "server and models gone")
