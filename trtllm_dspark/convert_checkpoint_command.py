# SPDX-License-Identifier: Apache-2.0
"""`dspark convert-checkpoint` and `build_scripts/convert_checkpoint.py`: a Hugging Face or GGUF
target, with its drafter, as a TensorRT-LLM checkpoint, or back.

Takes the flag names of TensorRT-LLM's converters, with dashes or underscores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.checkpoints import (
    convert_from_trtllm,
    convert_to_trtllm,
    find_drafter,
    prepared_model,
)
from trtllm_dspark.config import require
from trtllm_dspark.options import add_flag

LABELS = {"auto": None, "shifted": True, "unshifted": False}
TO_TRTLLM = {
    "dtype": "auto",
    "tp_size": 1,
    "use_parallel_embedding": False,
    "drafter_dir": "auto",
    "labels": "auto",
}
"""Flags that say how a checkpoint is written, and their defaults; with --back they mean nothing."""


def build_parser() -> argparse.ArgumentParser:
    """Arguments in upstream's spelling."""
    parser = argparse.ArgumentParser(
        prog="dspark convert-checkpoint",
        description="Write a TensorRT-LLM checkpoint (config.json, rank{N}.safetensors) of a "
        "Hugging Face or GGUF model, its drafter in the subdirectory drafter; or bring one back.",
        epilog="example: dspark convert-checkpoint --model-dir models/smollm2 --output-dir ckpt",
    )
    add_flag(
        parser,
        "model_dir",
        required=True,
        help="Hugging Face directory, .gguf file or smollm2; with --back a TensorRT-LLM checkpoint",
    )
    add_flag(parser, "output_dir", required=True, help="directory to create")
    add_flag(
        parser,
        "dtype",
        default=TO_TRTLLM["dtype"],
        choices=("auto", "bfloat16", "float16", "float32"),
        help="auto: as stored (bfloat16 for what is dequantised from GGUF)",
    )
    add_flag(
        parser, "tp_size", type=int, default=TO_TRTLLM["tp_size"], help="tensor-parallel ranks"
    )
    add_flag(parser, "use_parallel_embedding", action="store_true", help="cut the embedding too")
    add_flag(
        parser,
        "drafter_dir",
        default=TO_TRTLLM["drafter_dir"],
        help="auto (the model's own), none, or a drafter of any known layout",
    )
    add_flag(
        parser,
        "labels",
        choices=sorted(LABELS),
        default=TO_TRTLLM["labels"],
        help="which position a drafter's slot predicts; auto: as it says, else refused",
    )
    add_flag(parser, "back", action="store_true", help="TensorRT-LLM checkpoint → Hugging Face")
    return parser


def convert(arguments: argparse.Namespace) -> Path:
    """Convert in the direction asked for and return the directory."""
    output = Path(arguments.output_dir)
    if arguments.back:
        for name, default in TO_TRTLLM.items():
            found = getattr(arguments, name)
            require(found == default, name, found, "left out with --back, which takes all as it is")
        return convert_from_trtllm(arguments.model_dir, output)
    with prepared_model(arguments.model_dir, dtype=arguments.dtype) as source:
        return convert_to_trtllm(
            source,
            output,
            tp_size=arguments.tp_size,
            dtype=arguments.dtype,
            use_parallel_embedding=arguments.use_parallel_embedding,
            drafter_dir=find_drafter(source, arguments.drafter_dir),
            label_shift=LABELS[arguments.labels],
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and say where the result is."""
    print(convert(build_parser().parse_args(argv)))
    return 0
