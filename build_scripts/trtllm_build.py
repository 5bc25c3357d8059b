#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The exact `trtllm-build` command (tensorrt-llm ≥1.0,<1.3) that makes a stock target engine.

The stock backend then verifies drafts given with a request (`draft_input_ids`), such as our n-gram
drafts. It returns no tapped hidden states, so DSpark cannot draft from it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.checkpoints import convert_to_trtllm, load_model_config
from trtllm_dspark.config import load_json, require
from trtllm_dspark.errors import ConfigError, DSparkError

NO_TAPS = (
    "note: the stock engine returns no tapped hidden states: DSpark cannot draft from it; it "
    "verifies drafts that come with the request (draft_input_ids), such as n-gram drafts"
)
REMOVED = (
    "tensorrt-llm {version} has no engine flow any more (it was removed after 1.2.x): use "
    "`dspark build --model-dir … --output-dir … --backend tensorrt|tensorrt_rtx` of this project"
)


def build_parser() -> argparse.ArgumentParser:
    """Arguments under trtllm-build's names."""
    parser = argparse.ArgumentParser(
        prog="trtllm_build.py",
        description=__doc__,
        epilog="example: trtllm_build.py --model_dir models/smollm2 --checkpoint_dir ckpt/smollm2 "
        "--output_dir engines/stock --max_draft_len 7",
    )
    parser.add_argument("--model_dir", help="write the checkpoint from this directory first")
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_draft_len", type=int, default=7)
    parser.add_argument("--max_batch_size", type=int, default=16)
    parser.add_argument("--max_input_len", type=int, default=1024)
    parser.add_argument("--max_seq_len", type=int, default=2048)
    parser.add_argument("--max_num_tokens", type=int, default=512)
    parser.add_argument("--tokens_per_block", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--log_level", default="info")
    parser.add_argument("--run", action="store_true", help="execute the command")
    return parser


def installed_version(read: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """Version of tensorrt-llm on this machine, None without it."""
    try:
        return read("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(version: str | None) -> None:
    """Refuse versions without (or before) the flow this script knows."""
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
        "tokens_per_block": arguments.tokens_per_block,
        "workers": arguments.workers,
        "log_level": arguments.log_level,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return ["trtllm-build", *words]


def run(arguments: argparse.Namespace, version: str | None) -> int:
    """Write the checkpoint where asked, print the command, execute it with `--run`."""
    check_version(version)
    command = build_command(arguments)
    checkpoint = Path(arguments.checkpoint_dir)
    if arguments.model_dir:
        load_model_config(arguments.model_dir)
        convert_to_trtllm(arguments.model_dir, checkpoint)
    else:
        load_json(checkpoint / "config.json")
    print(shlex.join(command))
    print(NO_TAPS, file=sys.stderr)
    if not arguments.run:
        return 0
    if version is None:
        raise ConfigError("--run needs tensorrt-llm ≥1.0,<1.3, which is not installed here")
    return subprocess.run(command, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    try:
        return run(build_parser().parse_args(argv), installed_version())
    except DSparkError as error:
        print(f"trtllm_build.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
