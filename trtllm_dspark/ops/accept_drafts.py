# SPDX-License-Identifier: Apache-2.0
"""The op `accept_drafts`: exact acceptance of verified drafts. Its torch reference, and the kernel
where kernels run.

The rule, for one request with verified drafts x_1..x_ℓ and target rows 0..ℓ (row j predicts the
token after x_0..x_j; p = the row's distribution, q = the draft distribution of the slot):
  greedy     accept x_{j+1} iff it is row j's arg-max; the next token is the last row's arg-max
  rejection  accept x_{j+1} iff u·q(x) < p(x), i.e. with min(1, p/q); at the first rejection draw
             from max(p − q, 0); if all ℓ were accepted draw from p at row ℓ. Deterministic drafts
             have a one-hot q
  coupled    y = argmax(log p + Gumbel(seed, position)); accept iff x_{j+1} = y; the next token is y
A dropped draft (column ≥ ℓ) has no part in this: only its acceptance probability is reported.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from trtllm_dspark.ops.filter_probs import argmax_lowest, filtered_weights
from trtllm_dspark.ops.kernels import accept_by_kernel, runs_kernels
from trtllm_dspark.ops.sample_tokens import block_sums, sample_gumbel, sample_inverse_cdf


class AcceptRule(enum.IntEnum):
    """How a request's drafts are accepted; values of the `rules` input."""

    GREEDY = 0
    REJECTION = 1
    COUPLED = 2


def accept_drafts(
    *,
    logits: torch.Tensor,
    scale: torch.Tensor,
    thresholds: torch.Tensor | None,
    cu_rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    sampled: torch.Tensor,
    rules: torch.Tensor,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
    best_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (accepted_lens [R] int32, next_token_ids [R] int32, dropped_accept_probs [R] float32).

    logits [M, V] f32 or f64, penalties and masks applied; scale [R] = 1 / temperature still to
    apply
    thresholds [M]: smallest kept logit of a row (from the filter pass); None = no row is filtered
    cu_rows [R+1] int32: rows of request r; ℓ_r = cu_rows[r+1] − cu_rows[r] − 1 ≥ 0
    draft_token_ids [R, γ] int32, draft_lens [R] int32 (proposed: ℓ_r ≤ draft_lens[r] ≤ γ)
    draft_probs [≤ R, γ, V] q or None (read where sampled); sampled [R] bool: drafts were drawn from
    q (else q is one-hot)
    rules [R] int32 (`AcceptRule`); seeds [R] int64 (the 64 bits); anchor_positions [R] int64
    accept_uniforms [R, γ] and final_uniforms [R], float64 in [0, 1): read under REJECTION only

    best_ids [M] int64: each row's arg-max (lowest id of equals), if the caller knows it already

    dropped_accept_probs[r] is min(1, p/q) of x_{ℓ+1} at row ℓ (0 or 1 under the other rules) where
    all ℓ drafts were accepted and draft_lens[r] > ℓ, else NaN. Pure; all tensors on one device;
    this reference synchronises with the host, a kernel must not.

    Example, R=3, γ=2: cu_rows [0, 3, 4, 6] verifies 2, 0 and 1 drafts.
    """
    if runs_kernels(logits):
        return accept_by_kernel(
            logits=logits,
            scale=scale,
            thresholds=thresholds,
            cu_rows=cu_rows,
            draft_token_ids=draft_token_ids,
            draft_lens=draft_lens,
            draft_probs=draft_probs,
            sampled=sampled,
            rules=rules,
            accept_uniforms=accept_uniforms,
            final_uniforms=final_uniforms,
            seeds=seeds,
            anchor_positions=anchor_positions,
        )
    block = _Block(
        logits=logits,
        best_ids=argmax_lowest(logits) if best_ids is None else best_ids,
        scale=scale,
        thresholds=thresholds,
        first_rows=cu_rows[:-1].long(),
        verify_lens=(cu_rows[1:] - cu_rows[:-1] - 1).long(),
        token_ids=draft_token_ids.long().clamp(min=0),
        draft_lens=draft_lens.long(),
        probs=draft_probs,
        sampled=sampled,
    )
    outcome = _Outcome.empty(rules.shape[0], logits.device)
    requests = [torch.nonzero(rules == rule)[:, 0] for rule in AcceptRule]
    _accept_greedy(block, outcome, requests[AcceptRule.GREEDY])
    _accept_by_rejection(
        block, outcome, requests[AcceptRule.REJECTION], accept_uniforms, final_uniforms
    )
    _accept_coupled(block, outcome, requests[AcceptRule.COUPLED], seeds, anchor_positions)
    return outcome.accepted_lens, outcome.next_token_ids, outcome.dropped_accept_probs


@dataclass(frozen=True)
class _Block:
    """The inputs that every rule reads; shapes as in `accept_drafts`, integers int64."""

    logits: torch.Tensor
    best_ids: torch.Tensor
    scale: torch.Tensor
    thresholds: torch.Tensor | None
    first_rows: torch.Tensor
    verify_lens: torch.Tensor
    token_ids: torch.Tensor
    draft_lens: torch.Tensor
    probs: torch.Tensor | None
    sampled: torch.Tensor

    def drafts(self, who: torch.Tensor, column: int) -> torch.Tensor:
        """Draft ids of a column, 0 beyond the block (nothing verified or dropped is there)."""
        if column < self.token_ids.shape[1]:
            return self.token_ids[who, column]
        return torch.zeros_like(who)

    def row_thresholds(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Thresholds of some rows."""
        return None if self.thresholds is None else self.thresholds[rows]


@dataclass(frozen=True)
class _Outcome:
    """The outputs, filled in place request by request."""

    accepted_lens: torch.Tensor
    next_token_ids: torch.Tensor
    dropped_accept_probs: torch.Tensor

    @staticmethod
    def empty(num_requests: int, device: torch.device) -> _Outcome:
        """Nothing accepted yet."""
        return _Outcome(
            torch.zeros(num_requests, dtype=torch.int32, device=device),
            torch.full((num_requests,), -1, dtype=torch.int32, device=device),
            torch.full((num_requests,), torch.nan, dtype=torch.float32, device=device),
        )

    def close(self, who: torch.Tensor, accepted_len: torch.Tensor | int, ids: torch.Tensor) -> None:
        """Requests `who` end their block with `accepted_len` drafts and the next token `ids`."""
        self.accepted_lens[who] = torch.as_tensor(accepted_len, dtype=torch.int32).to(who.device)
        self.next_token_ids[who] = ids.to(torch.int32)


def _accept_greedy(block: _Block, outcome: _Outcome, who: torch.Tensor) -> None:
    if who.numel() == 0:
        return
    choices = block.best_ids
    first, verify_lens = block.first_rows[who], block.verify_lens[who]
    columns = torch.arange(block.token_ids.shape[1], device=who.device)[None]
    rows = first[:, None] + torch.minimum(columns, verify_lens[:, None])
    is_match = block.token_ids[who] == choices[rows]
    is_kept = is_match & (columns < verify_lens[:, None])
    accepted_lens = is_kept.long().cumprod(dim=1).sum(dim=1)
    outcome.close(who, accepted_lens, choices[first + accepted_lens])
    has_dropped = (accepted_lens == verify_lens) & (verify_lens < block.draft_lens[who])
    asked = torch.nonzero(has_dropped)[:, 0]
    outcome.dropped_accept_probs[who[asked]] = is_match[asked, verify_lens[asked]].float()


def _accept_by_rejection(
    block: _Block,
    outcome: _Outcome,
    who: torch.Tensor,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
) -> None:
    """Walk the columns, one row per request; it leaves at its first rejection or at row ℓ."""
    column = 0
    while who.numel():
        rows = block.first_rows[who] + column
        weights = filtered_weights(
            block.logits[rows],
            block.scale[who],
            block.row_thresholds(rows),
            largest=block.logits[rows, block.best_ids[rows]],
        )
        sums = block_sums(weights)
        totals = sums.sum(dim=-1)
        drafts = block.drafts(who, column)
        p_draft = weights.gather(1, drafts[:, None])[:, 0].double() / totals
        q_draft = _draft_prob(block, who, column, drafts)
        is_verified = column < block.verify_lens[who]
        is_accepted = is_verified
        if column < accept_uniforms.shape[1]:
            is_accepted = is_verified & (accept_uniforms[who, column] * q_draft < p_draft)
        is_dropped = ~is_verified & (column < block.draft_lens[who])
        ratio = (p_draft / q_draft).clamp(max=1.0).float()
        outcome.dropped_accept_probs[who[is_dropped]] = ratio[is_dropped]

        stops = torch.nonzero(~is_accepted)[:, 0]
        if stops.numel() < who.numel():
            weights, totals, sums = weights[stops], totals[stops], sums[stops]
        final = _final_weights(block, who[stops], column, weights, totals, is_verified[stops])
        ids = sample_inverse_cdf(
            final, final_uniforms[who[stops]], sums if final is weights else None
        )
        outcome.close(who[stops], column, ids)
        who = who[is_accepted]
        column += 1


def _draft_prob(
    block: _Block, who: torch.Tensor, column: int, drafts: torch.Tensor
) -> torch.Tensor:
    """Return q(x) of the column's drafts, float64; 1 where q is one-hot."""
    q = torch.ones(who.shape[0], dtype=torch.float64, device=who.device)
    if block.probs is not None and column < block.probs.shape[1]:
        rows = torch.nonzero(block.sampled[who])[:, 0]
        q[rows] = block.probs[who[rows], column, drafts[rows]].double()
    return q


def _final_weights(
    block: _Block,
    who: torch.Tensor,
    column: int,
    weights: torch.Tensor,
    totals: torch.Tensor,
    is_rejection: torch.Tensor,
) -> torch.Tensor:
    """Return the weights of the next token: max(p − q, 0) after a rejection, otherwise p as it is.

    weights [n, V] = p · totals [n]. An empty residual means p ≤ q everywhere, hence p = q (both sum
    to 1), and then a rejection has probability 0: it can only come from rounding, and drawing from
    p there keeps the emitted distribution equal to p.
    """
    rejected = torch.nonzero(is_rejection)[:, 0]
    residual = weights[rejected]
    requests = who[rejected]
    drafts = block.drafts(requests, column)
    is_sampled = block.sampled[requests] & (block.probs is not None)
    one_hot = torch.nonzero(~is_sampled)[:, 0]
    residual[one_hot, drafts[one_hot]] = 0.0
    if block.probs is not None and one_hot.numel() < rejected.numel():
        from_q = torch.nonzero(is_sampled)[:, 0]
        scaled_q = block.probs[requests[from_q], column] * totals[rejected[from_q], None]
        residual[from_q] = (residual[from_q] - scaled_q).clamp_(min=0.0).to(residual.dtype)
    usable = residual.amax(dim=-1) > 0.0
    if not usable.any():
        return weights
    final = weights.clone()
    final[rejected[usable]] = residual[usable]
    return final


def _accept_coupled(
    block: _Block,
    outcome: _Outcome,
    who: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
) -> None:
    column = 0
    while who.numel():
        rows = block.first_rows[who] + column
        keys = seeds[who].cpu().numpy().view("uint64")
        positions = (anchor_positions[who] + 1 + column).cpu().numpy()
        ids = sample_gumbel(
            block.logits[rows], block.scale[who], block.row_thresholds(rows), keys, positions
        )
        is_match = block.drafts(who, column) == ids
        is_verified = column < block.verify_lens[who]
        is_dropped = ~is_verified & (column < block.draft_lens[who])
        outcome.dropped_accept_probs[who[is_dropped]] = is_match[is_dropped].float()
        is_accepted = is_verified & is_match
        outcome.close(who[~is_accepted], column, ids[~is_accepted])
        who = who[is_accepted]
        column += 1
