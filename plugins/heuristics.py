# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and split counts as pure functions of shapes and a machine's size.

Host only: knows neither torch nor Triton-language, touches no device. Shared-memory bounds per
target are those of the CUDA programming guide's compute-capability table.
"""

from __future__ import annotations

from dataclasses import dataclass

SPLIT_ALIGN = 256
"""Least K/V rows per split, and what split boundaries are multiples of."""

MAX_SPLITS = 64
PARTIAL_BYTES_LIMIT = 256 << 20
"""Memory that the partials of one call may take (requests write only the splits they use)."""

PROGRAMS_PER_SM = 2
"""Attention programs that one multiprocessor surely holds at once (by shared memory)."""

SHARED_MEMORY_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory one block may use, in bytes, by compute capability."""


@dataclass(frozen=True)
class AttentionTiles:
    """Compile-time shape of one attention program."""

    block_m: int
    """Tile rows: query rows times the query heads of one K/V head."""
    block_n: int
    """K/V rows per loop step."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Machine:
    """What the heuristics must know of a GPU."""

    num_sms: int
    capability: int
    """10 · major + minor, as in 90 for sm_90."""


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉ for b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two ≥ n (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()


def choose_attention_tiles(
    max_query_len: int, q_per_kv: int, head_dim: int, capability: int, *, is_fp8: bool = False
) -> AttentionTiles:
    """Pick the tile from the longest query of the call: 16 rows for one token, 128 for prefill.

    The targets without warp-group products (sm_80, sm_120) hold both operands in registers, so
    large tiles and decoded fp8 blocks must be narrower there. Example: 5 verified rows of
    4 query heads per K/V head give 20 rows, hence block_m 32.
    """
    rows = max(max_query_len, 1) * q_per_kv
    block_m = min(max(next_power_of_2(min(rows, 128)), 16, next_power_of_2(q_per_kv)), 128)
    block_n = 64 if head_dim <= 128 else 32
    if (is_fp8 or block_m >= 64) and capability // 10 in (8, 12):
        block_n = 32
    num_stages = 2 if capability // 10 == 12 or block_m == 128 else 3
    return AttentionTiles(block_m, block_n, 8 if block_m == 128 else 4, num_stages)


def count_tiles(num_rows: int, num_requests: int, q_per_kv: int, block_m: int) -> int:
    """Tiles that cover any arrangement of num_rows query rows over num_requests requests."""
    return num_rows // (block_m // q_per_kv) + num_requests


def choose_num_splits(
    *,
    total_kv_rows: int,
    max_kv_rows: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    machine: Machine,
) -> int:
    """Split the longest request so that every multiprocessor gets its share of the work.

    The share is the batch's K/V rows times K/V heads over the programs that run at once; nothing is
    split below SPLIT_ALIGN rows, beyond MAX_SPLITS, or into partials of more than
    PARTIAL_BYTES_LIMIT. Example on 132 multiprocessors with 8 K/V heads: one request of 32768 rows
    → 32 splits of 1024; 256 requests of 512 rows → 1.
    """
    if total_kv_rows <= 0 or num_rows <= 0:
        return 1
    programs = machine.num_sms * PROGRAMS_PER_SM
    share = max(ceil_div(total_kv_rows * num_kv_heads, programs), SPLIT_ALIGN)
    bytes_per_split = num_rows * num_heads * (head_dim + 1) * 4
    bound = max(PARTIAL_BYTES_LIMIT // bytes_per_split, 1)
    return max(min(ceil_div(max_kv_rows, share), MAX_SPLITS, bound), 1)


@dataclass(frozen=True)
class VocabularyTile:
    """Compile-time shape of one vocabulary tile."""

    num_requests: int
    num_tokens: int
    num_warps: int


def choose_vocabulary_tile(num_requests: int, rank: int) -> VocabularyTile:
    """Tile of `markov_tile`: the requests of a tile share one read of W2's columns.

    Tiles of 64 requests take 8 warps: logits, weights and scores of one thread fit its registers.
    """
    rows = min(max(next_power_of_2(num_requests), 16), 64)
    return VocabularyTile(rows, 128 if rank <= 256 else 64, 8 if rows == 64 else 4)
