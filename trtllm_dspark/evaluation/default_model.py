# SPDX-License-Identifier: Apache-2.0
"""The model that evaluations and benchmarks run on when none is named: the demonstration's."""

from __future__ import annotations

from pathlib import Path

from trtllm_dspark.checkpoints import prepare_model
from trtllm_dspark.serving.demo_command import DEMO_MODEL, DEMO_MODEL_DIR


def prepare_default_model(model_dir: str) -> None:
    """Prepare the demonstration's model if it is meant and not there; other directories are left.

    One that is there is not touched: a drafter in it may be the user's own.
    """
    if model_dir == DEMO_MODEL_DIR and not Path(model_dir).is_dir():
        prepare_model(DEMO_MODEL, Path(model_dir))
