# SPDX-License-Identifier: Apache-2.0
"""The label convention: the order of evidence, and refusals instead of guesses."""

from __future__ import annotations

import re

import pytest

from trtllm_dspark.checkpoints.convert_command import build_parser
from trtllm_dspark.checkpoints.drafter_labels import resolve_label_shift
from trtllm_dspark.errors import CheckpointError


def speculators(kind: str, block_size: int, proposed: int | None, **more: object) -> dict:
    methods = [] if proposed is None else [{"speculative_tokens": proposed}]
    return {
        "speculators_model_type": kind,
        "block_size": block_size,
        "speculators_config": {"proposal_methods": methods},
        **more,
    }


@pytest.mark.parametrize(
    ("data", "override", "shifted"),
    [
        ({"architectures": ["DFlashDraftModel"]}, True, True),
        ({"architectures": ["Qwen3DSparkModel"]}, False, False),
        ({"sample_from_anchor": True}, False, False),
        ({"sample_from_anchor": True, "architectures": ["DFlashDraftModel"]}, None, True),
        ({"sample_from_anchor": False, "architectures": ["Qwen3DSparkModel"]}, None, False),
        ({"architectures": ["Qwen3DSparkModel"]}, None, True),
        ({"architectures": ["DFlashDraftModel"]}, None, False),
        (speculators("dspark", 8, None), None, True),
        (speculators("dspark", 8, 8), None, True),
        (speculators("dspark", 8, 5), None, True),
        (speculators("dflash", 8, None), None, False),
        (speculators("dflash", 8, 7), None, False),
        (speculators("dspark", 8, 7, sample_from_anchor=False), None, False),
        (speculators("dflash", 8, 8, sample_from_anchor=True), None, True),
    ],
)
def test_evidence_is_used_in_the_documented_order(data, override, shifted):
    assert resolve_label_shift(data, override) is shifted


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"architectures": []},
        {"architectures": ["DSparkDraftModel"]},
        {"architectures": ["Qwen3DSparkModel", "DFlashDraftModel"]},
        {"sample_from_anchor": False, "shift_label": True},
        speculators("dspark", 16, 15),
        speculators("dflash", 8, 8),
        speculators("dflash", 8, 7, shift_label=True),
    ],
)
def test_ambiguous_labels_are_refused_with_the_way_out(data):
    with pytest.raises(CheckpointError, match="ambiguous") as refusal:
        resolve_label_shift(data)
    advised = re.search(r"dspark convert (--\S+) (\w+)\|(\w+)", str(refusal.value))
    assert advised is not None
    flag, *values = advised.groups()
    for value in values:
        required = ["--drafter", "d", "--target", "t", "--output", "o"]
        assert value in vars(build_parser().parse_args([*required, flag, value])).values()
    assert resolve_label_shift(data, True) is True
