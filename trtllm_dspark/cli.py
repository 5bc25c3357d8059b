# SPDX-License-Identifier: Apache-2.0
"""`dspark`: one table of subcommands, each a module with `main(argv) -> int`, imported when called.

Exit codes: 0 ok, 1 a check failed or the machine did, 2 a bad configuration or request.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dspark._version import __version__
from trtllm_dspark.errors import ConfigError, DSparkError, InvalidRequestError


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command(
        "trtllm_dspark.serving.demo_command", "prepare a model, serve it, stream some answers"
    ),
    "prepare": Command("trtllm_dspark.checkpoints.prepare_command", "make a model directory"),
    "build": Command("trtllm_dspark.build_command", "build an engine directory per ratio bucket"),
    "serve": Command("trtllm_dspark.serving.serve_command", "run Triton on a model directory"),
    "generate": Command("trtllm_dspark.serving.generate", "answer one prompt without a server"),
    "convert": Command(
        "trtllm_dspark.checkpoints.convert_command", "write a published drafter in our format"
    ),
    "convert-checkpoint": Command(
        "trtllm_dspark.convert_checkpoint_command", "write or read a TensorRT-LLM checkpoint"
    ),
    "trtllm-build": Command(
        "trtllm_dspark.trtllm_build_command", "the trtllm-build command of a stock target engine"
    ),
    "fill-template": Command(
        "trtllm_dspark.serving.template", "fill a config.pbtxt of the model repository"
    ),
    "profile": Command(
        "trtllm_dspark.evaluation.profile_command", "measure the latency table of an engine"
    ),
    "generate-data": Command(
        "trtllm_dspark.training.generate_data", "let the target write training answers"
    ),
    "train": Command("trtllm_dspark.training.train", "train a drafter on such answers"),
    "fit-confidence": Command(
        "trtllm_dspark.training.fit_confidence", "fit a trained drafter's confidence head anew"
    ),
    "calibrate": Command(
        "trtllm_dspark.evaluation.calibrate_command", "fit calibration.json on held-out prompts"
    ),
    "evaluate": Command(
        "trtllm_dspark.evaluation.evaluate_command", "acceptance and confidences on prompts"
    ),
    "bench": Command(
        "trtllm_dspark.evaluation.bench_command", "speed of policies and drafters under load"
    ),
    "simulate": Command(
        "trtllm_dspark.evaluation.simulate_command", "policies on a latency table, without a model"
    ),
    "plan": Command(
        "trtllm_dspark.evaluation.plan_command", "γ and concurrency for a tokens/s-per-user target"
    ),
    "kernels": Command("dspark_plugins.kernels_command", "compile the GPU kernels without a GPU"),
}


def usage() -> str:
    """The top-level help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return (
        f"dspark {__version__}: lossless, load-aware speculative decoding behind Triton\n\n"
        "usage: dspark COMMAND [options]   (dspark COMMAND --help tells more)\n\n"
        + "\n".join(lines)
        + "\n\nexample: dspark demo\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; expected errors become one line on stderr and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"dspark: {name!r} is not a command\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[name].module).main(rest))
    except (ConfigError, InvalidRequestError) as error:
        print(f"dspark {name}: {error}", file=sys.stderr)
        return 2
    except DSparkError as error:
        print(f"dspark {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dspark {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
