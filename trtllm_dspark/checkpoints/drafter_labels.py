# SPDX-License-Identifier: Apache-2.0
"""Decides the label convention of a published drafter, or refuses to guess.

Shifted: slot k predicts anchor+k+1, every slot is a draft. Unshifted: slot j predicts its own
position, slot 0 is unused. The two give the same tensors; mixed up, almost nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_dspark.errors import CheckpointError

SHIFTED_ARCHITECTURES = frozenset({"Qwen3DSparkModel"})
UNSHIFTED_ARCHITECTURES = frozenset({"DFlashDraftModel"})
_SPECULATORS_DEFAULTS = {"dspark": True, "dflash": False}
_ADVICE = "say which it is (dspark convert --labels shifted|unshifted)"


def resolve_label_shift(data: Mapping[str, Any], override: bool | None = None) -> bool:
    """Whether labels are shifted: the override, else `sample_from_anchor`, else the architecture.

    `data` is a drafter's config.json with nested keys already flattened. Raises `CheckpointError`
    where its own statements disagree or none of them decides.
    """
    if override is not None:
        return override
    stated = data.get("sample_from_anchor")
    shift_label = data.get("shift_label")
    if stated is not None and shift_label and not stated:
        raise CheckpointError(
            f"label convention is ambiguous: sample_from_anchor = {stated!r} but shift_label = "
            f"{shift_label!r}; {_ADVICE}"
        )
    if stated is not None:
        return bool(stated)
    kind = data.get("speculators_model_type")
    if kind in _SPECULATORS_DEFAULTS:
        return _speculators_default(data, kind)
    return _of_architecture(data)


def _of_architecture(data: Mapping[str, Any]) -> bool:
    names = list(data.get("architectures") or [])
    shifted = any(name in SHIFTED_ARCHITECTURES for name in names)
    unshifted = any(name in UNSHIFTED_ARCHITECTURES for name in names)
    if shifted == unshifted:
        raise CheckpointError(
            f"label convention is ambiguous: neither sample_from_anchor nor architectures = "
            f"{names!r} decides it; {_ADVICE}"
        )
    return shifted


def _speculators_default(data: Mapping[str, Any], kind: str) -> bool:
    """Speculators' default for the type, unless the number of proposed tokens contradicts it."""
    shifted = _SPECULATORS_DEFAULTS[kind]
    block_size = data.get("block_size")
    methods = (data.get("speculators_config") or {}).get("proposal_methods") or []
    proposed = methods[0].get("speculative_tokens") if methods else None
    contradicted = (
        block_size is not None
        and proposed is not None
        and proposed == (block_size - 1 if shifted else block_size)
    )
    if contradicted or (not shifted and data.get("shift_label")):
        raise CheckpointError(
            f"label convention is ambiguous: sample_from_anchor is missing and the default of "
            f"{kind!r} ({shifted}) disagrees with speculative_tokens = {proposed}, block_size = "
            f"{block_size}, shift_label = {data.get('shift_label')}; {_ADVICE}"
        )
    return shifted
