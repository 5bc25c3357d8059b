# SPDX-License-Identifier: Apache-2.0
"""`dspark convert`: a published drafter in the unified format, checked against its target."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.checkpoints.drafter_writer import convert_drafter

LABELS = {"auto": None, "shifted": True, "unshifted": False}


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark convert`."""
    parser = argparse.ArgumentParser(
        prog="dspark convert",
        description="Write a z-lab DFlash, DeepSpec, Speculators or SpecForge drafter in the "
        "unified format.",
        epilog="example: dspark convert --drafter dspark_qwen3_4b_block7 --target Qwen3-4B "
        "--output models/qwen3-4b/drafter",
    )
    parser.add_argument("--drafter", required=True, help="checkpoint directory")
    parser.add_argument("--target", required=True, help="model directory it was trained for")
    parser.add_argument("--output", required=True, help="directory to create")
    parser.add_argument(
        "--labels",
        choices=sorted(LABELS),
        default="auto",
        help="which position a slot predicts; auto = as the checkpoint says, else refused",
    )
    parser.add_argument("--overwrite", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and say where the drafter is."""
    arguments = build_parser().parse_args(argv)
    convert_drafter(
        Path(arguments.drafter),
        Path(arguments.target),
        Path(arguments.output),
        label_shift=LABELS[arguments.labels],
        overwrite=arguments.overwrite,
    )
    print(arguments.output)
    return 0
