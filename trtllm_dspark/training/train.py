# SPDX-License-Identifier: Apache-2.0
"""`dspark train`: put target, data and trainer together from the command line."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from trtllm_dspark.checkpoints import load_drafter, load_model_config, load_target_weights
from trtllm_dspark.checkpoints.drafter_config import default_target_layer_ids
from trtllm_dspark.config import HEAD_TYPES, DrafterConfig, ModelConfig, to_json_dict
from trtllm_dspark.engines.fingerprint import hash_checkpoint
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.options import configure_logging
from trtllm_dspark.training.dataset import (
    SequenceStream,
    check_stores,
    hash_stores,
    load_sequence,
    usable_rows,
)
from trtllm_dspark.training.objective import LossWeights
from trtllm_dspark.training.optimizer import OPTIMIZERS
from trtllm_dspark.training.packing import TokenSequence
from trtllm_dspark.training.run_files import RunFiles
from trtllm_dspark.training.speed import can_fuse, fuse_modules_, keep_freed_memory
from trtllm_dspark.training.state_cache import (
    Cached,
    OnTheFly,
    StateFile,
    StateSource,
    bytes_per_token,
)
from trtllm_dspark.training.token_store import TokenStore
from trtllm_dspark.training.trainer import TrainConfig, Trainer
from trtllm_dspark.training.vocabulary import ActiveVocabulary, most_frequent_tokens
from trtllm_dspark.training.warm_start import copy_layers_, initialize_, load_drafter_

logger = logging.getLogger(__name__)

FUSED_MODULES = ("RMSNorm", "GatedMLP")


def parse_ids(text: str) -> tuple[int, ...]:
    """'1,7,14' → (1, 7, 14)."""
    return tuple(int(part) for part in text.split(","))


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark train`."""
    parser = argparse.ArgumentParser(
        prog="dspark train",
        description="Train a drafter on the target's own answers. Running the same command again "
        "resumes exactly where the last run stopped.",
        epilog="example: dspark train --model-dir smollm2 --data data --validation validation "
        "--output run --num-layers 3 --copy-layers 27,28,29 --head markov --rank 64",
    )
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--data", nargs="+", required=True, help="stores of dspark generate-data")
    parser.add_argument("--validation", nargs="*", default=[], help="stores of greedy answers")
    parser.add_argument("--output", required=True, help="run directory (state, log, best/, last/)")
    _add_model_arguments(parser)
    default = TrainConfig()
    parser.add_argument("--num-steps", type=int, default=default.num_steps)
    parser.add_argument("--blocks-per-step", type=int, default=default.blocks_per_step)
    parser.add_argument("--micro-blocks", type=int, default=default.micro_blocks)
    parser.add_argument("--max-anchors", type=int, default=default.max_anchors)
    parser.add_argument("--anchor-share", type=float, default=default.anchor_share)
    parser.add_argument("--max-len", type=int, default=default.max_len)
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=default.optimizer,
        help="muon: orthogonalised momentum for the hidden matrices, AdamW for the rest",
    )
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--warmup", type=float, default=default.warmup)
    parser.add_argument("--schedule", default=default.schedule)
    parser.add_argument("--ema-decay", type=float, default=default.ema_decay)
    parser.add_argument("--ce-weight", type=float, default=default.loss.ce)
    parser.add_argument("--tv-weight", type=float, default=default.loss.tv)
    parser.add_argument("--confidence-weight", type=float, default=default.loss.confidence)
    parser.add_argument("--decay", type=float, default=default.loss.decay)
    parser.add_argument(
        "--sample-slots",
        action="store_true",
        help="keep slot k with probability w_k instead of weighing it: the same expectation",
    )
    parser.add_argument(
        "--active-vocabulary",
        type=int,
        default=0,
        help="approximation: run the losses over this many frequent tokens, the batch's labels and "
        "a sample of the rest; 0 = the whole vocabulary",
    )
    parser.add_argument("--sampled-vocabulary", type=int, default=2048)
    parser.add_argument(
        "--cache-states",
        help="directory for the target's states (several epochs over the same data); "
        "default: compute them on the fly",
    )
    parser.add_argument("--max-cache-gib", type=float, default=8.0)
    parser.add_argument("--validate-every", type=int, default=default.validate_every)
    parser.add_argument("--max-validation-sequences", type=int, default=96)
    parser.add_argument("--save-every", type=int, default=default.save_every)
    parser.add_argument("--log-every", type=int, default=default.log_every)
    parser.add_argument("--max-minutes", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=1, help="threads, one per idle core")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-fuse", action="store_true", help="do not compile kernels")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument(
        "--copy-layers", type=parse_ids, default=None, help="target layers to start from"
    )
    parser.add_argument(
        "--init", metavar="DRAFTER", help="start from this drafter's weights (same options for it)"
    )
    parser.add_argument("--tap-layers", type=parse_ids, default=None)
    parser.add_argument("--head", choices=HEAD_TYPES, default="markov")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--num-drafts", type=int, default=7)
    parser.add_argument("--unshifted", action="store_true", help="DFlash's label convention")
    parser.add_argument("--no-confidence", action="store_true")
    parser.add_argument("--mask-token-id", type=int, default=0)


def drafter_config(arguments: argparse.Namespace, target: ModelConfig) -> DrafterConfig:
    """A drafter of the target's own layer shape."""
    taps = arguments.tap_layers or default_target_layer_ids(target.num_layers, 5)
    has_head = arguments.head != "none"
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=arguments.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        attention_bias=target.attention_bias,
        qk_norm=target.qk_norm,
        num_drafts=arguments.num_drafts,
        label_shift=not arguments.unshifted,
        mask_token_id=arguments.mask_token_id,
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        head_type=arguments.head,
        markov_rank=arguments.rank if has_head else 0,
        confidence_head=not arguments.no_confidence,
        confidence_with_markov=has_head and not arguments.no_confidence,
        confidence_bias=not arguments.no_confidence,
    )


def train_config(arguments: argparse.Namespace) -> TrainConfig:
    """The training half of the arguments."""
    return TrainConfig(
        num_steps=arguments.num_steps,
        blocks_per_step=arguments.blocks_per_step,
        micro_blocks=arguments.micro_blocks,
        max_anchors=arguments.max_anchors,
        anchor_share=arguments.anchor_share,
        max_len=arguments.max_len,
        optimizer=arguments.optimizer,
        lr=arguments.lr,
        warmup=arguments.warmup,
        schedule=arguments.schedule,
        ema_decay=arguments.ema_decay,
        loss=LossWeights(
            ce=arguments.ce_weight,
            tv=arguments.tv_weight,
            confidence=arguments.confidence_weight,
            decay=arguments.decay,
            sample_slots=arguments.sample_slots,
        ),
        log_every=arguments.log_every,
        validate_every=arguments.validate_every,
        save_every=arguments.save_every,
        max_minutes=arguments.max_minutes,
        seed=arguments.seed,
    )


def load_plain_target(model_dir: str | Path, dtype: torch.dtype) -> TargetModel:
    """The target with plain weights: blocked layouts only pay off at the row counts of serving."""
    config = load_model_config(model_dir)
    weights = {n: t.to(dtype) for n, t in load_target_weights(model_dir, config).items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model = TargetModel(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def load_validation(stores: Sequence[TokenStore], max_len: int, limit: int) -> list[TokenSequence]:
    """Validation answers, evenly thinned to `limit`."""
    sequences = []
    for store in stores:
        rows = usable_rows(store, len(store), max_len)
        sequences += [load_sequence(store, int(row), max_len) for row in rows]
    step = max(1, -(-len(sequences) // limit))
    return sequences[::step]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, resuming what the output directory holds."""
    arguments = build_parser().parse_args(argv)
    configure_logging(verbose=True)
    keep_freed_memory()
    config = train_config(arguments)
    dtype = getattr(torch, arguments.dtype)
    target = load_plain_target(arguments.model_dir, dtype)
    stores = [TokenStore(directory) for directory in arguments.data]
    validation = [TokenStore(directory) for directory in arguments.validation]
    model_hash = hash_checkpoint(arguments.model_dir)
    check_stores([*stores, *validation], arguments.model_dir, model_hash)
    model = build_drafter(arguments, target, dtype)
    fuse = not arguments.no_fuse and can_fuse()
    if fuse:
        fuse_modules_(target, FUSED_MODULES)
        fuse_modules_(model, FUSED_MODULES)
    if arguments.workers > 1:
        torch.set_num_threads(1)
    files = RunFiles(arguments.output)
    trainer = Trainer(
        config,
        model,
        DenseTarget(target, model.config.target_layer_ids),
        build_sources(arguments, target, model.config.target_layer_ids, stores, model_hash),
        SequenceStream(stores, config.seed, config.max_len),
        load_validation(validation, config.max_len, arguments.max_validation_sequences),
        files,
        fuse=fuse,
        vocabulary=build_vocabulary(arguments, stores, target.config.vocab_size),
    )
    is_resumed = trainer.resume()
    provenance = files.write_provenance(
        {
            "resumed_at_step": trainer.step_number if is_resumed else None,
            "data_sha256": hash_stores(stores),
            "num_sequences": sum(len(store) for store in stores),
            "num_answer_tokens": sum(store.num_answer_tokens for store in stores),
            "train": to_json_dict(config),
            "drafter": to_json_dict(model.config),
        }
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logger.info("training from step %d, fused kernels: %s", trainer.step_number, fuse)
    trainer.run({"provenance": provenance}, stop.is_set)
    return 0


def build_sources(
    arguments: argparse.Namespace,
    target: TargetModel,
    tap_layers: tuple[int, ...],
    stores: Sequence[TokenStore],
    model_hash: str,
) -> list[StateSource]:
    """One source of target states per worker; announces the size of a cache."""
    targets = [DenseTarget(target, tap_layers) for _ in range(arguments.workers)]
    if not arguments.cache_states:
        return [OnTheFly(one) for one in targets]
    identity = f"{model_hash} taps {list(tap_layers)} of {arguments.data}"
    file = StateFile(arguments.cache_states, targets[0], identity)
    num_tokens = sum(int(store.index[:, 2].sum()) for store in stores)
    logger.info(
        "states of the %d tokens there are now take %.2f GiB in %s; at most %.2f GiB are kept",
        num_tokens,
        num_tokens * bytes_per_token(targets[0]) / 2**30,
        arguments.cache_states,
        arguments.max_cache_gib,
    )
    return [Cached(one, file, int(arguments.max_cache_gib * 2**30)) for one in targets]


def build_vocabulary(
    arguments: argparse.Namespace, stores: Sequence[TokenStore], vocab_size: int
) -> ActiveVocabulary | None:
    """The approximation asked for, None for the whole vocabulary."""
    if not arguments.active_vocabulary:
        return None
    frequent = most_frequent_tokens(stores, vocab_size, arguments.active_vocabulary)
    return ActiveVocabulary(vocab_size, frequent, arguments.sampled_vocabulary)


def build_drafter(
    arguments: argparse.Namespace, target: TargetModel, dtype: torch.dtype
) -> DSparkModel:
    """The drafter to train as it is before the first step, in `dtype`."""
    config = drafter_config(arguments, target.config)
    model = DSparkModel(config, target.embed_tokens, target.lm_head)
    initialize_(model, target, torch.Generator().manual_seed(arguments.seed))
    if arguments.copy_layers:
        copy_layers_(model, target, arguments.copy_layers)
    if arguments.init:
        load_drafter_(model, *load_drafter(arguments.init, target.config))
    return model.to(dtype)


if __name__ == "__main__":
    raise SystemExit(main())
