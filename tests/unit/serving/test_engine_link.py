# SPDX-License-Identifier: Apache-2.0
"""Text models and engine over a real socket: answers, errors, stops, and either side leaving."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from trtllm_dspark.errors import EngineError, QueueFullError
from trtllm_dspark.serving import engine_link
from trtllm_dspark.serving.engine_link import (
    STOP,
    EngineCall,
    LinkFailure,
    LinkRequest,
    LinkResponder,
    LinkResponse,
    LinkServer,
    link_path,
)
from trtllm_dspark.serving.responses import TokenResponse

REQUEST = LinkRequest({"input_ids": np.array([[1, 2]], np.int32)}, "id", 0, ("output_ids",))


class Engine:
    """Keeps connections open and notes what happens on them."""

    def __init__(self, path: Path) -> None:
        self.connections: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.requests: list[LinkRequest] = []
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.server = LinkServer(path, self.serve)

    def serve(self, connection: Connection) -> None:
        self.requests.append(connection.recv())
        self.connections.put(connection)
        try:
            while connection.recv() == STOP:
                self.events.put("stop")
        except EOFError:
            self.events.put("left")

    def responder(self) -> LinkResponder:
        return LinkResponder(
            lambda job: job(),
            self.connections.get(timeout=10),
            lambda response: {
                "output_ids": np.array(response.token_ids),
                "unwanted": np.zeros(1),
            },
            lambda error: ("UNAVAILABLE", str(error)),
            REQUEST.wanted,
        )


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="link") as directory:
        yield Path(directory) / "e.sock"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    engine = Engine(path)
    yield engine
    engine.server.close()


def test_a_request_and_its_responses_arrive_in_order_with_wanted_outputs_only(
    engine: Engine, path: Path
) -> None:
    call = EngineCall(path, REQUEST)
    responder = engine.responder()
    responder.send(TokenResponse(token_ids=(5,)), final=False)
    responder.send(TokenResponse(token_ids=(6, 7)), final=True)
    first, last = call.receive(), call.receive()
    assert isinstance(first, LinkResponse) and isinstance(last, LinkResponse)
    assert first.outputs["output_ids"].tolist() == [5] and not first.is_final
    assert last.outputs["output_ids"].tolist() == [6, 7] and last.is_final
    assert set(last.outputs) == {"output_ids"}
    assert engine.requests[0].tensors["input_ids"].tolist() == [[1, 2]]
    call.close()


def test_an_error_arrives_with_its_code(engine: Engine, path: Path) -> None:
    call = EngineCall(path, REQUEST)
    engine.responder().fail(QueueFullError("full"))
    assert call.receive() == LinkFailure("UNAVAILABLE", "full")
    call.close()


def test_a_stop_reaches_the_engine_and_a_late_one_hurts_nobody(engine: Engine, path: Path) -> None:
    call = EngineCall(path, REQUEST)
    call.stop()
    assert engine.events.get(timeout=10) == "stop"
    call.close()
    call.stop()
    assert engine.events.get(timeout=10) == "left"


def test_a_text_model_that_leaves_stops_its_request_and_responses_go_nowhere(
    engine: Engine, path: Path
) -> None:
    call = EngineCall(path, REQUEST)
    responder = engine.responder()
    call.close()
    assert engine.events.get(timeout=10) == "left"
    for _ in range(3):
        responder.send(TokenResponse(token_ids=(5,)), final=False)


def test_an_engine_that_ends_is_an_error_not_a_hang(engine: Engine, path: Path) -> None:
    engine.server._serve = lambda connection: connection.recv()  # and closes
    call = EngineCall(path, REQUEST)
    with pytest.raises(EngineError, match="ended while"):
        call.receive()
    call.close()


def test_no_engine_at_all_is_an_error_that_names_the_socket(path: Path) -> None:
    with pytest.raises(EngineError, match=str(path)):
        EngineCall(path, REQUEST)


def test_many_requests_at_once_get_their_own_answers(engine: Engine, path: Path) -> None:
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        asked = LinkRequest({"n": np.array([number])}, str(number), 0, ("output_ids",))
        call = EngineCall(path, asked)
        message = call.receive()
        assert isinstance(message, LinkResponse)
        answers[number] = message.outputs["output_ids"].tolist()
        call.close()

    def answer(connection: Connection) -> None:
        number = int(connection.recv().tensors["n"][0])
        connection.send(LinkResponse({"output_ids": np.array([number])}, True))

    engine.server._serve = answer
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {n: [n] for n in range(64)}


def test_the_socket_lies_where_no_other_user_can_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link.tempfile, "gettempdir", lambda: str(tmp_path))
    path = link_path("tensorrt_llm")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path != link_path("another")
    path.parent.chmod(0o755)
    with pytest.raises(EngineError, match="open to other users"):
        link_path("tensorrt_llm")
