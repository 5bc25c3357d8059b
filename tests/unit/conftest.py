# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several rooms share: a tiny model with a drafter, and a private cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def drafted_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a random drafter; tests read it and write nothing into it."""
    from tests.unit.evaluation.tiny_system import write_model

    return write_model(tmp_path_factory.mktemp("models") / "drafted")


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test's own; the native kernels stay in the common one."""
    from trtllm_dspark.ops import native_library

    native_library.library()  # found once per process, and before the directory changes
    directory = tmp_path / "cache"
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(directory))
    return directory
