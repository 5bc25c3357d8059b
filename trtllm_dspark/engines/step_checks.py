# SPDX-License-Identifier: Apache-2.0
"""What every engine refuses before a step runs: shapes that disagree, ids outside their range.

Pure numpy. Past these checks ids are addresses, on whatever device.
"""

from __future__ import annotations

from trtllm_dspark.engines.protocol import DrafterStep, RoundStep, TargetStep
from trtllm_dspark.errors import EngineError
from trtllm_dspark.types import EngineInfo, IntArray


def check_target_step(step: TargetStep, info: EngineInfo) -> None:
    """Refuse a step whose shapes or ids cannot run, with the value found and what is allowed."""
    num_rows = len(step.token_ids)
    if step.rung not in info.rungs:
        raise EngineError(f"rung {step.rung} is not on the ladder {info.rungs}")
    if num_rows > step.rung or int(step.cu_query_lens[-1]) != num_rows:
        raise EngineError(
            f"{num_rows} rows, cu_query_lens[-1] = {int(step.cu_query_lens[-1])}, rung {step.rung}:"
            " rows and prefix sums must agree and fit the rung"
        )
    _check_range("token ids", step.token_ids, info.vocab_size, "the vocabulary")
    check_pages(step.page_table, info)


def check_drafter_step(step: DrafterStep, info: EngineInfo) -> None:
    """Refuse anchors outside the vocabulary and pages outside the pool."""
    _check_range("anchor ids", step.anchor_ids, info.vocab_size, "the vocabulary")
    check_pages(step.page_table, info)


def check_pages(page_table: IntArray, info: EngineInfo) -> None:
    """Refuse page ids outside the pool: past this point they are addresses."""
    _check_range("page ids", page_table, info.num_pages, "the page pool")


def check_round_step(step: RoundStep, info: EngineInfo) -> None:
    """Refuse a round that cannot run: a rung off the ladder or too short, ids out of range."""
    if step.rung not in info.rungs:
        raise EngineError(f"rung {step.rung} is not on the ladder {info.rungs}")
    num_rows = len(step.draft_caps) + min(step.capacity, int(step.draft_caps.sum()))
    if num_rows > step.rung:
        raise EngineError(
            f"{len(step.draft_caps)} anchors and {step.capacity} drafts do not fit rung "
            f"{step.rung}: lower the capacity or run a larger rung"
        )
    check_drafter_step(step.draft, info)


def _check_range(name: str, values: IntArray, size: int, what: str) -> None:
    if not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= size:
        raise EngineError(f"{name} from {low} to {high} are outside {what} of {size}")
