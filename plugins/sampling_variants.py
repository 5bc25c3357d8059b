# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the selection and sampling kernels that are compiled ahead of time.

Importing this file imports the kernels, hence Triton-language; it needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton.language as tl
from dspark_plugins import filter_thresholds
from dspark_plugins.accept_drafts import AS_LOGITS, AS_PROBS, BLOCK_TOKENS, NUM_WARPS, ONE_HOT
from dspark_plugins.heuristics import choose_vocabulary_tile, next_power_of_2
from dspark_plugins.kernel_variant import KernelVariant
from dspark_plugins.kernels.accept_drafts import accept_drafts_kernel
from dspark_plugins.kernels.filter_thresholds import filter_thresholds_kernel
from dspark_plugins.kernels.markov_select import markov_select_kernel
from dspark_plugins.kernels.markov_tile import markov_tile_kernel
from dspark_plugins.kernels.select_drafts import select_drafts_kernel


@dataclass(frozen=True)
class DrafterSpec:
    """Shapes of a drafter's heads."""

    name: str
    vocab_size: int
    rank: int
    hidden_size: int
    with_peak: bool = False
    """Whether the confidence head sees the peak."""


SMOLLM2_DRAFTER = DrafterSpec("smollm2_135m", 49152, 64, 576, with_peak=True)
QWEN3_DRAFTER = DrafterSpec("qwen3_8b", 151936, 256, 4096)


def list_sampling_variants() -> list[KernelVariant]:
    """Every specialisation of the kernels that choose tokens, in a fixed order."""
    return [
        *_select_variants(),
        *_tile_variants(),
        *_markov_select_variants(),
        *_accept_variants(),
        *_filter_variants(),
    ]


def _select_variants() -> Iterator[KernelVariant]:
    for num_requests, num_drafts in ((64, 7), (256, 15)):
        types = {
            "survivals_ptr": "*fp32",
            "capacity_ptr": "*i32",
            "caps_ptr": "*i32",
            "anchor_ids_ptr": "*i32",
            "anchor_positions_ptr": "*i32",
            "draft_ids_ptr": "*i32",
            "num_requests": "i32",
            "rung": "i32",
            "verify_lens_ptr": "*i32",
            "cu_query_lens_ptr": "*i32",
            "token_ids_ptr": "*i32",
            "positions_ptr": "*i32",
            "row_requests_ptr": "*i32",
        }
        constants = {
            "NUM_DRAFTS": num_drafts,
            "BLOCK_DRAFTS": next_power_of_2(num_drafts),
            "BLOCK_REQUESTS": next_power_of_2(num_requests),
            "BLOCK_ROWS": 1024,
        }
        name = f"r{num_requests}_g{num_drafts}"
        yield KernelVariant("select_drafts", name, select_drafts_kernel, types, constants)


def _tile_variants() -> Iterator[KernelVariant]:
    for drafter, num_requests, has_noise, stores_logits in (
        (SMOLLM2_DRAFTER, 8, False, False),
        (QWEN3_DRAFTER, 8, False, False),
        (QWEN3_DRAFTER, 64, False, False),
        (QWEN3_DRAFTER, 64, True, True),
    ):
        tile = choose_vocabulary_tile(num_requests, drafter.rank)
        types = {
            "base_logits_ptr": "*bf16",
            "features_ptr": "*bf16",
            "w2_ptr": "*bf16",
            "scales_ptr": "*fp32",
            "thresholds_ptr": "*fp32",
            "modes_ptr": "*i32",
            "seeds_ptr": "*i64",
            "anchor_positions_ptr": "*i32",
            "num_requests": "i32",
            "num_tiles": "i32",
            "row_stride": "i32",
            "row_offset": "i32",
            "slot": "i32",
            "tile_scores_ptr": "*fp32",
            "tile_ids_ptr": "*i32",
            "tile_logits_ptr": "*fp32",
            "tile_max_ptr": "*fp32",
            "tile_mass_ptr": "*fp32",
            "tile_plain_mass_ptr": "*fp32",
            "logits_out_ptr": "*fp32",
        }
        constants = {
            "VOCAB": drafter.vocab_size,
            "RANK": drafter.rank,
            "HAS_HEAD": True,
            "HAS_NOISE": has_noise,
            "STORE_LOGITS": stores_logits,
            "WITH_PEAK": drafter.with_peak,
            "DOT_DTYPE": tl.bfloat16,
            "BLOCK_R": tile.num_requests,
            "BLOCK_V": tile.num_tokens,
            "BLOCK_K": 64,
        }
        name = f"{drafter.name}_r{num_requests}{'_sampled' if has_noise else '_greedy'}"
        yield KernelVariant(
            "markov_tile", name, markov_tile_kernel, types, constants, num_warps=tile.num_warps
        )


def _markov_select_variants() -> Iterator[KernelVariant]:
    for drafter in (SMOLLM2_DRAFTER, QWEN3_DRAFTER):
        types = {
            "tile_scores_ptr": "*fp32",
            "tile_ids_ptr": "*i32",
            "tile_logits_ptr": "*fp32",
            "tile_max_ptr": "*fp32",
            "tile_mass_ptr": "*fp32",
            "tile_plain_mass_ptr": "*fp32",
            "scales_ptr": "*fp32",
            "previous_ids_ptr": "*i32",
            "hidden_ptr": "*bf16",
            "w1_ptr": "*bf16",
            "confidence_weight_ptr": "*bf16",
            "confidence_bias_ptr": "*bf16",
            "num_tiles": "i32",
            "row_stride": "i32",
            "row_offset": "i32",
            "next_ids_ptr": "*i32",
            "next_features_ptr": "*bf16",
            "token_ids_ptr": "*i32",
            "draft_probs_ptr": "*fp32",
            "confidence_ptr": "*fp32",
            "stats_ptr": "*fp32",
        }
        constants = {
            "HIDDEN": drafter.hidden_size,
            "RANK": drafter.rank,
            "HAS_HEAD": True,
            "HAS_CONFIDENCE": True,
            "WITH_MARKOV": True,
            "WITH_PEAK": drafter.with_peak,
            "BLOCK_T": next_power_of_2(-(-drafter.vocab_size // 128)),
            "BLOCK_H": 1024,
            "BLOCK_K": drafter.rank,
        }
        yield KernelVariant("markov_select", drafter.name, markov_select_kernel, types, constants)


def _accept_variants() -> Iterator[KernelVariant]:
    for drafter, form, has_thresholds, has_coupled in (
        (SMOLLM2_DRAFTER, ONE_HOT, False, False),
        (QWEN3_DRAFTER, ONE_HOT, False, True),
        (QWEN3_DRAFTER, AS_PROBS, True, True),
        (QWEN3_DRAFTER, AS_LOGITS, True, True),
    ):
        types = {
            "logits_ptr": "*fp32",
            "thresholds_ptr": "*fp32",
            "scales_ptr": "*fp32",
            "cu_rows_ptr": "*i32",
            "draft_ids_ptr": "*i32",
            "draft_lens_ptr": "*i32",
            "draft_probs_ptr": "*fp32",
            "draft_stats_ptr": "*fp32",
            "draft_thresholds_ptr": "*fp32",
            "sampled_ptr": "*i8",
            "rules_ptr": "*i32",
            "accept_uniforms_ptr": "*fp64",
            "final_uniforms_ptr": "*fp64",
            "seeds_ptr": "*i64",
            "anchor_positions_ptr": "*i64",
            "num_requests": "i32",
            "accepted_lens_ptr": "*i32",
            "next_ids_ptr": "*i32",
            "dropped_ptr": "*fp32",
        }
        constants = {
            "VOCAB": drafter.vocab_size,
            "NUM_DRAFTS": 7,
            "HAS_THRESHOLDS": has_thresholds,
            "HAS_COUPLED": has_coupled,
            "DRAFT_FORM": form,
            "BLOCK": BLOCK_TOKENS,
        }
        name = f"{drafter.name}_{('one_hot', 'probs', 'logits')[form]}"
        yield KernelVariant(
            "accept_drafts", name, accept_drafts_kernel, types, constants, num_warps=NUM_WARPS
        )


def _filter_variants() -> Iterator[KernelVariant]:
    for drafter in (SMOLLM2_DRAFTER, QWEN3_DRAFTER):
        types = {
            "logits_ptr": "*fp32",
            "scales_ptr": "*fp32",
            "top_k_ptr": "*i32",
            "top_p_ptr": "*fp32",
            "min_p_ptr": "*fp32",
            "num_rows": "i32",
            "thresholds_ptr": "*fp32",
        }
        constants = {
            "VOCAB": drafter.vocab_size,
            "BLOCK": filter_thresholds.BLOCK_TOKENS,
            "BLOCK_MASS": filter_thresholds.BLOCK_MASS_TOKENS,
            "FAN": filter_thresholds.NUM_PIVOTS,
        }
        yield KernelVariant(
            "filter_thresholds",
            drafter.name,
            filter_thresholds_kernel,
            types,
            constants,
            num_warps=filter_thresholds.NUM_WARPS,
        )
