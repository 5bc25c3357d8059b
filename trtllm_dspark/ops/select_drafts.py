# SPDX-License-Identifier: Apache-2.0
"""`select_drafts`: the drafts worth verifying, packed into the rows that the target will run.

The torch reference of the op, and the kernel where kernels run. Equal to the numpy
policy (`scheduling.selection.select_drafts`) on verify_lens. It knows survivals, caps and a
capacity, not where they came from; nothing in it needs the host, so that drafting and verifying can
follow each other on a device without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_dspark.ops.kernels import runs_kernels

PADDING_REQUEST = -1
"""row_requests of a padding row."""


@dataclass(frozen=True)
class Selection:
    """The packed ragged batch of one step; rows beyond cu_query_lens[R] are padding.

    Example, R=3, γ=2, rung 8, verify_lens [2, 1, 0]: cu_query_lens [0, 3, 5, 6], row_requests
    [0, 0, 0, 1, 1, 2, −1, −1].
    """

    verify_lens: torch.Tensor
    """[R] int32 drafts to verify, ℓ_r ≤ caps[r]."""
    cu_query_lens: torch.Tensor
    """[R+1] int32 prefix sums of 1 + ℓ_r (of 0 where the request is absent)."""
    token_ids: torch.Tensor
    """[rung] int32 anchors and drafts, 0 on padding rows."""
    positions: torch.Tensor
    """[rung] int32 absolute positions, 0 on padding rows."""
    row_requests: torch.Tensor
    """[rung] int32 request of every row, PADDING_REQUEST on padding rows."""


def select_drafts(
    survivals: torch.Tensor,
    capacity: torch.Tensor,
    caps: torch.Tensor,
    anchor_ids: torch.Tensor,
    anchor_positions: torch.Tensor,
    draft_ids: torch.Tensor,
    rung: int,
) -> Selection:
    """Verify the `capacity` drafts of highest survival; ties go by (position, request).

    survivals [R, γ] float32 in [0, 1], not increasing along γ, 0 = not drafted, never chosen;
    capacity [1] int32; caps [R] int32, −1 = request absent (a padding request: no rows at all);
    anchor_ids, anchor_positions [R] int32; draft_ids [R, γ] int32. The rung must hold all present
    anchors and `capacity` drafts. Values are trusted: they are checked where survivals are made.
    """
    if runs_kernels(survivals):
        return _select_on_device(
            survivals, capacity, caps, anchor_ids, anchor_positions, draft_ids, rung
        )
    verify_lens = _choose(survivals, int(capacity), caps)
    is_present = caps >= 0
    query_lens = torch.where(is_present, verify_lens + 1, 0)
    ends = query_lens.cumsum(0, dtype=torch.int32)
    cu_query_lens = torch.cat((ends.new_zeros(1), ends))
    num_rows = int(cu_query_lens[-1])
    if num_rows > rung:
        raise ValueError(
            f"{num_rows} rows do not fit rung {rung}: the capacity ({int(capacity)}) must leave "
            f"room for {int(is_present.sum())} anchors"
        )
    requests = torch.repeat_interleave(torch.arange(len(caps)), query_lens)
    offsets = torch.arange(num_rows) - cu_query_lens[requests]
    tokens = torch.cat((anchor_ids[:, None], draft_ids), dim=1)[requests, offsets]
    positions = anchor_positions[requests] + offsets
    return Selection(
        verify_lens,
        cu_query_lens,
        _pad(tokens, rung, 0),
        _pad(positions, rung, 0),
        _pad(requests, rung, PADDING_REQUEST),
    )


def _choose(survivals: torch.Tensor, capacity: int, caps: torch.Tensor) -> torch.Tensor:
    """verify_lens [R] int32: a stable descending sort of the position-major survivals."""
    num_requests, num_drafts = survivals.shape
    columns = torch.arange(num_drafts)
    is_admissible = (columns < caps[:, None]) & (survivals > 0)
    by_position = torch.where(is_admissible, survivals, -1.0).T.reshape(-1)
    order = torch.sort(by_position, descending=True, stable=True).indices
    chosen = torch.zeros(by_position.numel(), dtype=torch.bool)
    chosen[order[: max(capacity, 0)]] = True
    chosen &= by_position > 0
    return chosen.view(num_drafts, num_requests).sum(0, dtype=torch.int32)


def _pad(values: torch.Tensor, rung: int, filler: int) -> torch.Tensor:
    padded = torch.full((rung,), filler, dtype=torch.int32)
    padded[: values.numel()] = values
    return padded


def _select_on_device(
    survivals: torch.Tensor,
    capacity: torch.Tensor,
    caps: torch.Tensor,
    anchor_ids: torch.Tensor,
    anchor_positions: torch.Tensor,
    draft_ids: torch.Tensor,
    rung: int,
) -> Selection:
    from dspark_plugins.select_drafts import plan_select_drafts, run_select_drafts

    plan = plan_select_drafts(*survivals.shape, rung=rung, device=survivals.device)
    out = run_select_drafts(
        plan, survivals, capacity, caps, anchor_ids, anchor_positions, draft_ids
    )
    return Selection(
        out.verify_lens, out.cu_query_lens, out.token_ids, out.positions, out.row_requests
    )
