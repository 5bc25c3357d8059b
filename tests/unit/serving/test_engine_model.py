# SPDX-License-Identifier: Apache-2.0
"""Loading beside the engine thread: the loading thread is gone when the engine begins."""

from __future__ import annotations

import threading

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.serving.engine_model import load_aside


def test_the_thread_that_loads_has_ended_when_loading_is_done() -> None:
    loaded_on = load_aside(threading.current_thread)
    assert loaded_on is not threading.current_thread()
    assert not loaded_on.is_alive()


def test_an_error_of_loading_is_raised_to_the_server() -> None:
    def fail() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        load_aside(fail)
