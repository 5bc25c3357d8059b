# SPDX-License-Identifier: Apache-2.0
"""`dspark fit-confidence`: a finished drafter gets a new confidence head, and nothing else changes.

The head is fitted on the target's answers for the drafts that this drafter really makes, and it may
see the peak of its slot's own distribution, which training does not need.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from trtllm_dspark.checkpoints import load_drafter
from trtllm_dspark.checkpoints.drafter_writer import check_output, write_drafter
from trtllm_dspark.config import load_json, require, to_json_dict
from trtllm_dspark.engines.fingerprint import hash_checkpoint
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.options import configure_logging
from trtllm_dspark.training.confidence_fit import FitConfig, collect_events, fit_head
from trtllm_dspark.training.dataset import check_stores, hash_stores, load_sequence, usable_rows
from trtllm_dspark.training.packing import TokenSequence
from trtllm_dspark.training.run_files import describe_run
from trtllm_dspark.training.token_store import TokenStore
from trtllm_dspark.training.train import load_plain_target, load_validation
from trtllm_dspark.training.validation import summarize_walk, walk_sequences

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """Options of `dspark fit-confidence`."""
    default = FitConfig()
    parser = argparse.ArgumentParser(
        prog="dspark fit-confidence",
        description="Fit the confidence head of a trained drafter anew, on the target's answers. "
        "The backbone and the drafts stay as they are; run dspark calibrate on the result.",
        epilog="example: dspark fit-confidence --model-dir smollm2 --drafter run/best --data data "
        "--validation validation --output drafter",
    )
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--drafter", required=True, help="directory of a drafter for this target")
    parser.add_argument("--data", nargs="+", required=True, help="stores of dspark generate-data")
    parser.add_argument("--validation", nargs="*", default=[], help="stores of greedy answers")
    parser.add_argument("--output", required=True, help="directory of the new drafter")
    parser.add_argument("--overwrite", action="store_true", help="replace a drafter in --output")
    parser.add_argument("--no-peak", action="store_true", help="leave the peak out")
    parser.add_argument("--max-sequences", type=int, default=2000, help="answers to fit on")
    parser.add_argument("--max-validation-sequences", type=int, default=96)
    parser.add_argument("--max-len", type=int, default=768)
    parser.add_argument("--anchor-share", type=float, default=default.anchor_share)
    parser.add_argument(
        "--sampled-share",
        type=float,
        default=default.sampled_share,
        help="weight of acceptance at temperature 1 against that of greedy drafts",
    )
    parser.add_argument("--decay", type=float, default=default.decay)
    parser.add_argument("--ridge", type=float, default=default.ridge)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=default.seed)
    return parser


def choose_sequences(
    stores: Sequence[TokenStore], max_len: int, limit: int, seed: int
) -> list[TokenSequence]:
    """At most `limit` answers, drawn from all stores alike."""
    rows = [
        (store, int(row)) for store in stores for row in usable_rows(store, len(store), max_len)
    ]
    if not rows:
        raise ConfigError("--data holds no answer of two tokens or more: run dspark generate-data")
    chosen = np.random.default_rng(seed).permutation(len(rows))[:limit]
    return [load_sequence(store, row, max_len) for store, row in (rows[i] for i in chosen)]


def with_new_head(drafter: DSparkModel, target: TargetModel, *, with_peak: bool) -> DSparkModel:
    """The drafter with a confidence head, not yet fitted, that sees what it is to see."""
    config = dataclasses.replace(
        drafter.config,
        confidence_head=True,
        confidence_with_markov=drafter.markov is not None,
        confidence_bias=True,
        confidence_with_peak=with_peak,
    )
    model = DSparkModel(config, target.embed_tokens, target.lm_head)
    weights = {n: w for n, w in drafter.state_dict().items() if not n.startswith("confidence.")}
    model.load_state_dict({**model.state_dict(), **weights}, strict=True)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, fit, write; print what validation says before and after."""
    arguments = build_parser().parse_args(argv)
    configure_logging(verbose=True)
    require(arguments.max_sequences >= 1, "--max-sequences", arguments.max_sequences, "≥ 1")
    check_output(arguments.output, overwrite=arguments.overwrite)
    fit = FitConfig(
        arguments.anchor_share,
        arguments.sampled_share,
        arguments.decay,
        arguments.ridge,
        arguments.seed,
    )
    dtype = getattr(torch, arguments.dtype)
    target = load_plain_target(arguments.model_dir, dtype)
    stores = [TokenStore(directory) for directory in arguments.data]
    validation = [TokenStore(directory) for directory in arguments.validation]
    check_stores([*stores, *validation], arguments.model_dir, hash_checkpoint(arguments.model_dir))
    old_config, weights = load_drafter(arguments.drafter, target.config)
    old = DSparkModel(old_config, target.embed_tokens, target.lm_head)
    old.load_state_dict(dict(weights), strict=True)
    old = old.to(dtype).requires_grad_(False)
    model = with_new_head(old, target, with_peak=not arguments.no_peak)
    model = model.to(dtype).requires_grad_(False)
    dense = DenseTarget(target, model.config.target_layer_ids)
    held_out = load_validation(validation, arguments.max_len, arguments.max_validation_sequences)
    before = judge(old, dense, held_out)
    sequences = choose_sequences(stores, arguments.max_len, arguments.max_sequences, fit.seed)
    with Progress() as progress:
        task = progress.add_task("collect", total=len(sequences))
        events = collect_events(
            model, dense, sequences, fit, lambda done: progress.update(task, completed=done)
        )
    weight, bias = fit_head(events, fit)
    head = {"confidence.proj.weight": weight, "confidence.proj.bias": bias}
    model.load_state_dict(head, strict=False)
    after = judge(model, dense, held_out)
    logger.info("%d slots of %d answers; on validation:", len(events.slots), len(sequences))
    for name, found in (("before", before), ("after", after)):
        if found:
            logger.info("%s: ROC-AUC %s", name, [round(x, 3) for x in found["roc_auc"]])
    provenance = {
        **describe_run(),
        "data_sha256": hash_stores(stores),
        "num_sequences": len(sequences),
        "num_slots": len(events.slots),
        "fit": to_json_dict(fit),
        "before": before,
        "after": after,
    }
    stored = {n: w.to(torch.bfloat16) for n, w in model.state_dict().items()}
    given = load_json(Path(arguments.drafter, "config.json")).get("extra", {})
    extra = {**given, "confidence_fit": provenance}
    write_drafter(
        arguments.output, model.config, stored, extra=extra, overwrite=arguments.overwrite
    )
    logger.info("wrote %s: run dspark calibrate on it", arguments.output)
    return 0


def judge(
    model: DSparkModel, target: DenseTarget, sequences: Sequence[TokenSequence]
) -> dict[str, Any]:
    """What validation says of a drafter; empty without validation answers."""
    if not sequences or model.confidence is None:
        return {}
    return summarize_walk(walk_sequences(model, target, sequences), model.config.num_drafts)


if __name__ == "__main__":
    raise SystemExit(main())
