# SPDX-License-Identifier: Apache-2.0
"""`dspark demo` as a user runs it: the real model through the real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demonstration_prints_real_text_and_a_summary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_dspark.cli", "demo", "--max-tokens", "24"]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command += ["What is the capital of France?"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    for line in ("throughput", "mean acceptance length", "keep ratio", "time to first token"):
        assert line in result.stdout
