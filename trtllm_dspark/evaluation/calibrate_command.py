# SPDX-License-Identifier: Apache-2.0
"""`dspark calibrate`: collect fully verified blocks on held-out prompts, fit one temperature per
position and mode, write calibration.json beside the drafter. Modes that were not fitted this time
stay as they are, if the file is of the same drafter.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_dspark._version import __version__
from trtllm_dspark.engines.fingerprint import hash_checkpoint
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.block_collection import collect_blocks, mode_params
from trtllm_dspark.evaluation.progress import ProgressReport
from trtllm_dspark.evaluation.prompts import add_prompt_options, load_prompts
from trtllm_dspark.options import add_system_options, configure_logging, system_config
from trtllm_dspark.runtime import System, build_system, drafter_dir
from trtllm_dspark.scheduling.calibration import Calibration, ModeCalibration, fit_mode
from trtllm_dspark.scheduling.interchange import temperatures_to_sglang
from trtllm_dspark.types import DraftMode, IntArray

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark calibrate`."""
    parser = argparse.ArgumentParser(
        prog="dspark calibrate",
        description="Fit confidences per position and mode from full verification.",
        epilog="example: dspark calibrate --model-dir models/smollm2 --prompts prompts/*.jsonl",
    )
    add_prompt_options(parser, "0.7:0.8")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[m.value for m in DraftMode],
        default=None,
        help="default: all; the other modes of the drafter's file are kept",
    )
    parser.add_argument("--output", help="default: calibration.json in the drafter's directory")
    parser.add_argument("--sglang", help="also write SGLang's form of the greedy mode here")
    parser.add_argument("--tensorrt-llm", help="also write TensorRT-LLM's form of it here")
    parser.add_argument("--verbose", action="store_true")
    add_system_options(parser, policy="fixed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, fit, write, show."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    config = system_config(arguments)
    modes = [DraftMode(name) for name in arguments.modes] if arguments.modes else list(DraftMode)
    check_exports(modes, arguments)
    directory = drafter_dir(config)
    if directory is None:
        raise ConfigError(
            f"{config.model_dir} has no DSpark drafter to calibrate: name one with --drafter"
        )
    path = Path(arguments.output) if arguments.output else directory / "calibration.json"
    earlier = Calibration.load(path) if path.is_file() else None
    system = build_system(config)
    prompts = load_prompts(arguments.prompts, arguments.slice, system.tokenizer)
    tokens = [prompt.token_ids for prompt in prompts]
    part = ":".join(f"{bound:g}" for bound in arguments.slice)
    dataset = f"{', '.join(Path(p).stem for p in arguments.prompts)} [{part}]"
    fitted = {mode: calibrate_mode(system, tokens, mode, arguments, dataset) for mode in modes}
    provenance = {
        "version": __version__,
        "fingerprint": system.info.fingerprint,
        "drafter": hash_checkpoint(directory),
    }
    calibration = Calibration(system.info.num_drafts, fitted, provenance)
    keep_modes(calibration, earlier, path).save(path)
    export(calibration, arguments)
    console = Console()
    for mode, values in fitted.items():
        console.print(render(mode, values))
    console.print(f"written to {path}")
    return 0


def calibrate_mode(
    system: System,
    prompts: Sequence[IntArray],
    mode: DraftMode,
    arguments: argparse.Namespace,
    dataset: str,
) -> ModeCalibration:
    """Collect and fit one mode, with a progress bar."""
    params = mode_params(mode, arguments.max_new_tokens, tuple(system.tokenizer.eos_ids))
    with ProgressReport(mode.value, len(prompts)) as progress:
        blocks = collect_blocks(
            system.engine, prompts, mode, params, on_finish=lambda _: progress.advance()
        )
    return fit_mode(blocks.samples, dataset=dataset)


def check_exports(modes: Sequence[DraftMode], arguments: argparse.Namespace) -> None:
    """Refuse other servers' forms where the mode they are of is not fitted."""
    asked = [
        name
        for name, value in (
            ("--sglang", arguments.sglang),
            ("--tensorrt-llm", arguments.tensorrt_llm),
        )
        if value
    ]
    greedy = DraftMode.GREEDY_TARGET
    if asked and greedy not in modes:
        raise ConfigError(
            f"{' and '.join(asked)} would write the mode {greedy.value}, --modes is "
            f"{' '.join(mode.value for mode in modes)}: add {greedy.value} to --modes"
        )


def keep_modes(fitted: Calibration, earlier: Calibration | None, path: Path) -> Calibration:
    """The modes just fitted and, of the same drafter's file, those that were not."""
    if earlier is None:
        return fitted
    if not is_same_drafter(fitted, earlier):
        logger.warning(
            "%s does not say that it is of this drafter and γ: it is replaced, its modes (%s) are "
            "not kept",
            path,
            ", ".join(mode.value for mode in earlier.modes),
        )
        return fitted
    modes = {**earlier.modes, **fitted.modes}
    return Calibration(fitted.num_drafts, modes, fitted.provenance)


def is_same_drafter(one: Calibration, other: Calibration) -> bool:
    """By γ and the drafter's digest; a file without a digest is known by the engine's alone."""
    name = "drafter" if "drafter" in other.provenance else "fingerprint"
    found = other.provenance.get(name)
    return (
        one.num_drafts == other.num_drafts
        and found is not None
        and found == one.provenance.get(name)
    )


def export(calibration: Calibration, arguments: argparse.Namespace) -> None:
    """Other servers' forms; both know one mode only, the greedy one."""
    greedy = calibration.modes.get(DraftMode.GREEDY_TARGET)
    if greedy is None:  # nothing was asked for: see check_exports
        return
    forms = (
        (
            arguments.sglang,
            temperatures_to_sglang(
                greedy.temperatures,
                dataset=greedy.dataset,
                num_samples=greedy.num_samples,
                ece_before=greedy.ece_before,
                ece_after=greedy.ece_temperatures,
            ),
        ),
        (arguments.tensorrt_llm, {"sts_temperatures": list(greedy.temperatures)}),
    )
    for path, data in forms:
        if path:
            Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def render(mode: DraftMode, fitted: ModeCalibration) -> Table:
    """What the fit achieved, per position."""
    view = Table(title=f"{mode.value}: {fitted.num_samples} blocks")
    columns = ("survival_rate", "conditional_rate", "ece_before", "ece_after", "roc_auc")
    for name in ("position", "slope", "offset", *columns):
        view.add_column(name.replace("_", " "), justify="right")
    for k, (slope, offset) in enumerate(zip(fitted.slopes, fitted.offsets, strict=True)):
        values = [f"{getattr(fitted, name)[k]:.3f}" for name in columns]
        view.add_row(str(k + 1), f"{slope:.2f}", f"{offset:.2f}", *values)
    return view


if __name__ == "__main__":
    raise SystemExit(main())
