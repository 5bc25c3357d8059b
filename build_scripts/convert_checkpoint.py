#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face or GGUF target (and drafter) → TensorRT-LLM checkpoint, or back with `--back`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.checkpoints import convert_from_trtllm, convert_to_trtllm, prepare_model
from trtllm_dspark.config import require
from trtllm_dspark.errors import DSparkError

LABELS = {"auto": None, "shifted": True, "unshifted": False}


def build_parser() -> argparse.ArgumentParser:
    """Arguments in upstream's spelling."""
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py",
        description=__doc__,
        epilog="example: convert_checkpoint.py --model_dir models/smollm2 --output_dir ckpt",
    )
    parser.add_argument("--model_dir", required=True, help="HF directory, .gguf, or smollm2")
    parser.add_argument("--output_dir", required=True, help="directory to create")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16, float32")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--use_parallel_embedding", action="store_true")
    parser.add_argument("--drafter_dir", help="drafter of any known layout")
    parser.add_argument("--labels", choices=sorted(LABELS), default="auto")
    parser.add_argument("--back", action="store_true", help="TensorRT-LLM checkpoint → HF")
    return parser


def run(arguments: argparse.Namespace) -> Path:
    """Convert in the direction asked for."""
    source, output = Path(arguments.model_dir), Path(arguments.output_dir)
    if arguments.back:
        require(arguments.drafter_dir is None, "drafter_dir", arguments.drafter_dir, "left out")
        return convert_from_trtllm(source, output)
    with tempfile.TemporaryDirectory() as scratch:
        if not source.is_dir():
            source = prepare_model(arguments.model_dir, Path(scratch) / "model")
        return convert_to_trtllm(
            source,
            output,
            tp_size=arguments.tp_size,
            dtype=arguments.dtype,
            use_parallel_embedding=arguments.use_parallel_embedding,
            drafter_dir=arguments.drafter_dir,
            label_shift=LABELS[arguments.labels],
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and say where the result is."""
    try:
        print(run(build_parser().parse_args(argv)))
    except DSparkError as error:
        print(f"convert_checkpoint.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
