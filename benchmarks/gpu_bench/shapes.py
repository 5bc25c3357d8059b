# SPDX-License-Identifier: Apache-2.0
"""Model shapes: Qwen3-8B with its drafter, and small ones for the loop and smoke tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A decoder, and the drafter that goes with it."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    drafter_layers: int
    tap_layers: tuple[int, ...]
    markov_rank: int
    page_size: int = 32

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output projection."""
        return self.hidden_size * self.vocab_size


QWEN3_8B = ModelSpec("qwen3_8b", 4096, 36, 32, 8, 128, 12288, 151936, 5, (1, 9, 17, 25, 33), 256)
SMALL = ModelSpec("small", 512, 4, 8, 2, 64, 1024, 4096, 2, (1, 3), 64)
TINY = ModelSpec("tiny", 32, 2, 2, 1, 16, 32, 48, 1, (0, 1), 16, page_size=16)
