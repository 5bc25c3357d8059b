# SPDX-License-Identifier: Apache-2.0
"""What a build will make, decided and checked before it starts: limits, sizes, table.

Pure arithmetic on configurations; reads no weights and imports no builder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dspark.config import BucketConfig, DrafterConfig, ModelConfig, require
from trtllm_dspark.engines.build_profiles import EngineLimits

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KERNEL_BYTES_PER_PROFILE, KERNEL_BYTES_PER_LAYER = 1_500_000, 480_000
"""Of a TensorRT-RTX engine, the latter per profile and layer: fitted to engines of SmolLM2's shape
with 2 and with 30 layers (TensorRT-RTX 1.7).
"""


@dataclass(frozen=True)
class BuildShape:
    """The limits as asked for; 0 = decide from the model."""

    buckets: BucketConfig
    max_seq_len: int = 2048
    max_input_len: int = 0
    page_size: int = 32
    num_pages: int = 0
    max_draft_len: int = 0
    """0 = γ of the drafter; another value is refused."""
    gpu_memory_gb: float = 0.0
    """0 = not known; otherwise what does not fit is refused."""


def plan_limits(
    shape: BuildShape,
    model: ModelConfig,
    drafter: DrafterConfig | None,
    rungs: Sequence[int],
    request_buckets: Sequence[int],
) -> EngineLimits:
    """Resolve the limits of a build; ConfigError names what cannot be combined."""
    gamma = 0 if drafter is None else drafter.num_drafts
    block = 0 if drafter is None else gamma + (0 if drafter.label_shift else 1)
    _check(shape, model, drafter, gamma)
    rows = shape.max_seq_len + block + 1
    per_request = math.ceil(rows / shape.page_size)
    num_pages = shape.num_pages or request_buckets[-1] * per_request + 1
    require(
        num_pages >= per_request + 1,
        "num_pages",
        num_pages,
        f"≥ {per_request + 1}: one sequence of max_seq_len = {shape.max_seq_len} and the scratch "
        "page",
    )
    return EngineLimits(
        rungs=tuple(rungs),
        request_buckets=tuple(request_buckets),
        num_drafts=gamma,
        block_len=block,
        max_seq_len=shape.max_seq_len,
        page_size=shape.page_size,
        num_pages=num_pages,
    )


def _check(
    shape: BuildShape, model: ModelConfig, drafter: DrafterConfig | None, gamma: int
) -> None:
    buckets = shape.buckets
    require(
        shape.max_draft_len in (0, gamma),
        "max_draft_len",
        shape.max_draft_len,
        f"left out or {gamma}, the drafter's block"
        if drafter is not None
        else "left out: there is no drafter (--drafter-dir)",
    )
    most = buckets.max_num_requests * (gamma + 1)
    require(
        buckets.max_num_tokens >= most,
        "max_num_tokens",
        buckets.max_num_tokens,
        f"≥ {most} = max_batch_size {buckets.max_num_requests} · (γ + 1 = {gamma + 1}), the "
        "largest bucket",
    )
    require(
        shape.max_seq_len <= model.max_position_embeddings,
        "max_seq_len",
        shape.max_seq_len,
        f"≤ {model.max_position_embeddings}, the model's positions",
    )
    require(
        shape.max_input_len <= shape.max_seq_len - 1,
        "max_input_len",
        shape.max_input_len,
        f"< max_seq_len = {shape.max_seq_len}",
    )
    require(shape.page_size >= 1, "tokens_per_block", shape.page_size, "≥ 1")
    if drafter is not None:
        require(
            drafter.vocab_size == model.vocab_size
            and drafter.target_hidden_size == model.hidden_size
            and drafter.num_target_layers == model.num_layers,
            "drafter",
            (drafter.vocab_size, drafter.target_hidden_size, drafter.num_target_layers),
            f"made for this target (vocabulary, hidden size, layers) = "
            f"{(model.vocab_size, model.hidden_size, model.num_layers)}",
        )


def check_memory(shape: BuildShape, sizes: Sizes) -> None:
    """Refuse what exceeds the named GPU memory."""
    limit = int(shape.gpu_memory_gb * 1e9)
    require(
        limit == 0 or sizes.total_bytes <= limit,
        "gpu_memory_gb",
        shape.gpu_memory_gb,
        f"≥ {sizes.total_bytes / 1e9:.2f}: weights {format_bytes(sizes.weight_bytes)} and K/V "
        f"pages {format_bytes(sizes.kv_bytes)}; lower num_pages, max_seq_len or max_batch_size",
    )


@dataclass(frozen=True)
class Sizes:
    """Estimated bytes."""

    target_weight_bytes: int
    """Of all target files together: each holds them."""
    drafter_weight_bytes: int
    kv_bytes: int
    """Both models' pages; twice without plugins (pages are not updated in place)."""
    target_extra_bytes: int = 0
    """Kernels of every profile, and weights in a second layout; 0 where nothing is known of them
    (full TensorRT) or there are none (torch).
    """
    drafter_extra_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Both models' weights."""
        return self.target_weight_bytes + self.drafter_weight_bytes

    @property
    def total_bytes(self) -> int:
        """Weights and pages; activations come on top."""
        return self.weight_bytes + self.kv_bytes


def estimate_sizes(
    model: ModelConfig,
    drafter: DrafterConfig | None,
    limits: EngineLimits,
    dtype: str,
    *,
    in_place: bool,
    separate: bool = False,
) -> Sizes:
    """Weights from the shapes, K/V from the pool; kernels of TensorRT-RTX (not `in_place`)."""
    width = BYTES[dtype]
    per_row = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    drafter_weights = 0
    if drafter is not None:
        per_row += 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
        drafter_weights = _drafter_parameters(drafter, model)
    rows = limits.num_pages * limits.page_size * (1 if in_place else 2)
    target = _target_parameters(model) * width * (len(limits.rungs) if separate else 1)
    extra = [0, 0]
    if not in_place:
        extra[0] = _extra_bytes(model, len(limits.rungs), width)
        extra[1] = _extra_bytes(drafter, len(limits.request_buckets) + 1, width) if drafter else 0
    return Sizes(target, drafter_weights * width, rows * per_row * width, *extra)


def _extra_bytes(model: ModelConfig | DrafterConfig, num_profiles: int, width: int) -> int:
    """Kernels; and gate and up, which lie in a second layout beside the first (looked up)."""
    kernels = KERNEL_BYTES_PER_PROFILE + model.num_layers * KERNEL_BYTES_PER_LAYER
    gate_up = 2 * model.hidden_size * model.intermediate_size * width
    return num_profiles * kernels + model.num_layers * gate_up


def _layer_parameters(
    hidden: int, intermediate: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return attention + 3 * hidden * intermediate + 2 * hidden


def _target_parameters(m: ModelConfig) -> int:
    layer = _layer_parameters(
        m.hidden_size, m.intermediate_size, m.num_heads, m.num_kv_heads, m.head_dim
    )
    heads = 1 if m.tie_word_embeddings else 2
    return m.num_layers * layer + heads * m.vocab_size * m.hidden_size


def _drafter_parameters(d: DrafterConfig, m: ModelConfig) -> int:
    """Backbone and heads, and the target's embedding and head that its engine holds too."""
    layer = _layer_parameters(
        d.hidden_size, d.intermediate_size, d.num_heads, d.num_kv_heads, d.head_dim
    )
    taps = len(d.target_layer_ids) * d.target_hidden_size * d.hidden_size
    borrowed = (1 if m.tie_word_embeddings else 2) * m.vocab_size * m.hidden_size
    return d.num_layers * layer + taps + 2 * d.vocab_size * d.markov_rank + borrowed


@dataclass(frozen=True)
class BucketRow:
    """One cell of the grid."""

    num_requests: int
    ratio: float
    num_tokens: int
    """R + ⌈ρ·R·(D−1)⌉ rows before rounding."""
    rung: int


def bucket_rows(
    limits: EngineLimits, ratios: Sequence[float], totals: dict[tuple[int, float], int]
) -> list[BucketRow]:
    """The grid with the rung that runs each cell; `totals` maps (requests, ratio) to rows."""
    rows = []
    for requests in limits.request_buckets:
        for ratio in ratios:
            total = totals[requests, ratio]
            rung = next(r for r in limits.rungs if r >= total)
            rows.append(BucketRow(requests, ratio, total, rung))
    return rows


def format_plan(limits: EngineLimits, rows: Sequence[BucketRow], sizes: Sizes) -> str:
    """The dry run's text: buckets with shapes, the ladder, memory."""
    lines = [f"{'requests':>8} {'ratio':>6} {'tokens':>7} {'rung':>5}  shapes"]
    for row in rows:
        requests = limits.requests_on(row.rung)
        lines.append(
            f"{row.num_requests:>8} {row.ratio:>6.2f} {row.num_tokens:>7} {row.rung:>5}  "
            f"token_ids [{row.rung}], page_table [{requests}, ≤{limits.max_table_width}], "
            f"logits [{limits.logit_rows_on(row.rung)}, V]"
        )
    drafter = _engine_size(sizes.drafter_weight_bytes, sizes.drafter_extra_bytes)
    lines += [
        f"ladder ({len(limits.rungs)} target profiles): {' '.join(map(str, limits.rungs))}",
        f"pages: {limits.num_pages} of {limits.page_size} tokens; γ = {limits.num_drafts}",
        f"K/V memory: {format_bytes(sizes.kv_bytes)}",
        "estimated engine sizes: "
        f"target {_engine_size(sizes.target_weight_bytes, sizes.target_extra_bytes)}, "
        + (f"drafter {drafter}" if sizes.drafter_weight_bytes else "no drafter"),
    ]
    return "\n".join(lines)


def _engine_size(weight_bytes: int, extra_bytes: int) -> str:
    weights = f"{format_bytes(weight_bytes)} of weights"
    return f"{format_bytes(weight_bytes + extra_bytes)} ({weights})" if extra_bytes else weights


def format_bytes(count: int) -> str:
    """1536000 → '1.5 MB'."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
