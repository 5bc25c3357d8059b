# SPDX-License-Identifier: Apache-2.0
"""`dspark trtllm-build` and `build_scripts/trtllm_build.py`: the exact `trtllm-build` command
(tensorrt-llm ≥1.0,<1.3) that makes a stock target engine.

The stock backend then verifies drafts given with a request (`draft_input_ids`), such as our n-gram
drafts. It returns no tapped hidden states, so DSpark cannot draft from it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trtllm_dspark.checkpoints import convert_to_trtllm, prepared_model
from trtllm_dspark.config import load_json, require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.options import add_flag

TOOL = "trtllm-build"
NO_TAPS = (
    "note: the stock engine returns no tapped hidden states: DSpark cannot draft from it; it "
    "verifies drafts that come with the request (draft_input_ids), such as n-gram drafts"
)
REMOVED = (
    "tensorrt-llm {version} has no engine flow any more (it was removed after 1.2.x): use "
    "`dspark build --model-dir … --output-dir … --backend tensorrt|tensorrt_rtx` of this project"
)
LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")
NUMBERS = {
    "max_draft_len": 7,
    "max_batch_size": 16,
    "max_input_len": 1024,
    "max_seq_len": 2048,
    "max_num_tokens": 512,
    "tokens_per_block": 32,
    "workers": 1,
}
"""Whole numbers handed on under their own names, and their defaults."""


def build_parser() -> argparse.ArgumentParser:
    """Arguments under trtllm-build's names, with dashes or underscores."""
    parser = argparse.ArgumentParser(
        prog="dspark trtllm-build",
        description="Print (with --run execute) the trtllm-build command, for tensorrt-llm ≥1.0 "
        "and <1.3, of a stock engine that verifies drafts sent with a request. It returns no "
        "tapped hidden states, so DSpark cannot draft from it.",
        epilog="example: dspark trtllm-build --model-dir models/smollm2 --checkpoint-dir "
        "ckpt/smollm2 --output-dir engines/stock --max-draft-len 7",
    )
    add_flag(parser, "model_dir", help="write the checkpoint from this model first")
    add_flag(
        parser,
        "dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="of that checkpoint; auto: as stored",
    )
    add_flag(parser, "tp_size", type=int, default=1, help="ranks of that checkpoint")
    add_flag(parser, "checkpoint_dir", required=True, help="TensorRT-LLM checkpoint")
    add_flag(parser, "output_dir", required=True, help="where trtllm-build puts the engine")
    for name, default in NUMBERS.items():
        add_flag(parser, name, type=int, default=default, help=f"default: {default}")
    add_flag(parser, "log_level", default="info", choices=LOG_LEVELS)
    parser.add_argument("--run", action="store_true", help="execute the command")
    return parser


def installed_version(read: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """Version of tensorrt-llm on this machine, None without it."""
    try:
        return read("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(version: str | None) -> None:
    """Refuse versions without (or before) the flow this command knows."""
    if version is None:
        return
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) >= (1, 3):
        raise ConfigError(REMOVED.format(version=version))
    require(major >= 1, "tensorrt-llm", version, "≥ 1.0 and < 1.3")


def build_command(arguments: argparse.Namespace) -> list[str]:
    """The command line of `trtllm-build`."""
    require(arguments.max_draft_len >= 1, "max_draft_len", arguments.max_draft_len, "≥ 1")
    most = arguments.max_batch_size * (arguments.max_draft_len + 1)
    require(
        arguments.max_num_tokens >= most,
        "max_num_tokens",
        arguments.max_num_tokens,
        f"≥ {most} = max_batch_size · (max_draft_len + 1)",
    )
    require(
        arguments.max_input_len < arguments.max_seq_len,
        "max_input_len",
        arguments.max_input_len,
        f"< max_seq_len = {arguments.max_seq_len}",
    )
    flags = {
        "checkpoint_dir": arguments.checkpoint_dir,
        "output_dir": arguments.output_dir,
        "max_batch_size": arguments.max_batch_size,
        "max_input_len": arguments.max_input_len,
        "max_seq_len": arguments.max_seq_len,
        "max_num_tokens": arguments.max_num_tokens,
        "speculative_decoding_mode": "draft_tokens_external",
        "max_draft_len": arguments.max_draft_len,
        "kv_cache_type": "paged",
        "use_paged_context_fmha": "enable",  # drafts are verified over pages that hold a context
        "tokens_per_block": arguments.tokens_per_block,
        "workers": arguments.workers,
        "log_level": arguments.log_level,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [TOOL, *words]


def run(arguments: argparse.Namespace, version: str | None) -> int:
    """Write the checkpoint where asked, print the command, execute it with `--run`."""
    check_version(version)
    command = build_command(arguments)
    checkpoint = Path(arguments.checkpoint_dir)
    if arguments.model_dir:
        with prepared_model(arguments.model_dir, dtype=arguments.dtype) as source:
            convert_to_trtllm(source, checkpoint, tp_size=arguments.tp_size, dtype=arguments.dtype)
    else:
        load_json(checkpoint / "config.json")
    print(shlex.join(command), flush=True)
    print(NO_TAPS, file=sys.stderr)
    if not arguments.run:
        return 0
    if version is None:
        raise ConfigError("--run needs tensorrt-llm ≥1.0,<1.3, which is not installed here")
    if shutil.which(TOOL) is None:
        raise ConfigError(
            f"--run: tensorrt-llm {version} is installed but {TOOL} is not on the PATH: activate "
            "its environment, or run the printed command there"
        )
    return subprocess.run(command, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """See the module docstring; with `--run` the exit code is trtllm-build's."""
    return run(build_parser().parse_args(argv), installed_version())
