# SPDX-License-Identifier: Apache-2.0
"""Names that an exported graph and whoever runs it agree on. Needs nothing that exporting needs."""

from __future__ import annotations

PLUGIN_OPS = (
    "kv_append_",
    "ragged_verify_attention",
    "ragged_verify_reduce",
    "markov_tile",
    "markov_select",
)
"""Nodes of the target's and the drafter's graphs that full TensorRT makes plugins of."""


def pages_in(layer: int) -> str:
    """Input name of one layer's pages."""
    return f"kv_pages_{layer}"


def pages_out(layer: int) -> str:
    """Output name of one layer's pages; bound to the input's memory where the backend may."""
    return f"new_kv_pages_{layer}"
