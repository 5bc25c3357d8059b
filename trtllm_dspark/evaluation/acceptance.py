# SPDX-License-Identifier: Apache-2.0
"""Acceptance length, survival and conditional acceptance per domain and macro-averaged over
domains, with bootstrap intervals over prompts (blocks of one prompt are not independent), and the
acceptance rate under static thresholds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.evaluation.block_collection import PromptBlocks, join_blocks
from trtllm_dspark.scheduling.block_statistics import BlockCounts, count_blocks
from trtllm_dspark.scheduling.calibration import BlockSamples
from trtllm_dspark.scheduling.reliability import Vector

NUM_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


@dataclass(frozen=True)
class Estimate:
    """Values and what they become when prompts are drawn again."""

    value: dict[str, Vector]
    """acceptance_length [], survival [γ], conditional [γ]"""
    draws: dict[str, Vector]
    """The same with a leading axis of resamples."""

    def to_json_dict(self) -> dict[str, Any]:
        """Values, and 95 % intervals as NAME_ci95."""
        data: dict[str, Any] = {}
        for name, value in self.value.items():
            data[name] = value.tolist()
            with warnings.catch_warnings():  # a position that nothing reached stays NaN
                warnings.simplefilter("ignore", RuntimeWarning)
                low, high = np.nanpercentile(self.draws[name], INTERVAL, axis=0)
            data[f"{name}_ci95"] = np.stack([low, high], axis=-1).tolist()
        return data


def estimate_acceptance(
    answers: Sequence[PromptBlocks], num_drafts: int, rng: np.random.Generator
) -> Estimate:
    """One domain: pool its blocks, resample its prompts."""
    blocks = join_blocks(answers, num_drafts)
    counts = count_blocks(blocks.samples, blocks.prompt_ids, len(answers))
    size = len(answers)
    weights = rng.multinomial(size, np.full(size, 1.0 / size), NUM_RESAMPLES).astype(np.float64)
    whole = counts.resample(np.ones((1, size)))
    return Estimate(
        {name: values[0] for name, values in _rates(whole).items()},
        _rates(counts.resample(weights)),
    )


def _rates(counts: BlockCounts) -> dict[str, Vector]:
    return {
        "acceptance_length": counts.acceptance_length,
        "survival": counts.survival,
        "conditional": counts.conditional,
    }


def macro_average(domains: Mapping[str, Estimate]) -> Estimate:
    """Mean over domains; each was resampled on its own."""
    parts = list(domains.values())
    names = parts[0].value
    return Estimate(
        {n: np.asarray(np.mean([p.value[n] for p in parts], axis=0)) for n in names},
        {n: np.asarray(np.mean([p.draws[n] for p in parts], axis=0)) for n in names},
    )


def group_answers(
    answers: Sequence[PromptBlocks], labels: Sequence[str]
) -> dict[str, list[PromptBlocks]]:
    """Answers by label, labels in order of first appearance."""
    groups: dict[str, list[PromptBlocks]] = {}
    for answer, label in zip(answers, labels, strict=True):
        groups.setdefault(label, []).append(answer)
    return groups


def describe_group(
    answers: Sequence[PromptBlocks], num_drafts: int, rng: np.random.Generator
) -> tuple[Estimate, dict[str, Any]]:
    """A domain's estimate and its JSON form with counts.

    `tokens_per_step` counts every decode step to the end of each answer; `acceptance_length` only
    blocks with at least γ tokens still to come, so that it does not depend on answers' lengths.
    """
    estimate = estimate_acceptance(answers, num_drafts, rng)
    steps = sum(answer.num_steps for answer in answers)
    tokens = sum(answer.num_tokens for answer in answers)
    return estimate, {
        **estimate.to_json_dict(),
        "tokens_per_step": (tokens - len(answers)) / steps if steps else None,
        "num_prompts": len(answers),
        "num_blocks": sum(len(answer.logits) for answer in answers),
        "num_answer_tokens": tokens,
    }


def sweep_thresholds(
    samples: BlockSamples,
    confidences: npt.NDArray[np.float64],
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[dict[str, Any]]:
    """What verifying up to the first c_k < t would have verified and accepted.

    Exact for each block, since full verification revealed every position; over the blocks that
    full verification visits.
    """
    rows = []
    full = samples.verify_lens >= samples.num_drafts
    accepted, count = samples.accepted_lens[full], max(1, int(full.sum()))
    for threshold in thresholds:
        lens = np.logical_and.accumulate(confidences[full] >= threshold, axis=1).sum(axis=1)
        verified, kept = int(lens.sum()), int(np.minimum(accepted, lens).sum())
        rows.append(
            {
                "threshold": threshold,
                "acceptance_rate": kept / verified if verified else None,
                "verified_per_block": verified / count,
                "acceptance_length": 1.0 + kept / count,
            }
        )
    return rows
