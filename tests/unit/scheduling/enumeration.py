# SPDX-License-Identifier: Apache-2.0
"""Exact enumeration of speculative decoding: real policy objects on toy tables, every outcome of
drafting and acceptance, equal states merged.

`output_distribution` returns the distribution of whole continuations of R requests; a policy is
lossless iff it equals the one of plain sampling (`toys.target_distribution`).
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.unit.scheduling.toys import (
    Acceptance,
    Case,
    Noise,
    Tokens,
    accept_coupled,
    accept_exactly,
    draft_blocks,
)
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision
from trtllm_dspark.types import DraftMode, StepOutcome


@dataclass
class Seen:
    """What happened on the way, for the tests' own sanity."""

    capacities: set[int] = field(default_factory=set)
    decisions: set[str] = field(default_factory=set)
    num_states: int = 0
    last_step: int = 0


# --- policies as states --------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "table" if isinstance(obj, LatencyTable) else None


def freeze(policy: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(policy)
    return buffer.getvalue()


def thaw(state: bytes, table: LatencyTable) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(state))
    unpickler.persistent_load = lambda _: table  # type: ignore[method-assign]
    return unpickler.load()


def learns(policy: Any) -> bool:
    return type(policy).observe.__doc__ != "Nothing to learn."


# --- the process ----------------------------------------------------------------------------------

State = tuple[tuple[Tokens, ...], tuple[Noise, ...], bytes]


def output_distribution(
    case: Case, policy: Any, acceptance: Acceptance = accept_exactly
) -> tuple[dict[tuple[Tokens, ...], float], Seen]:
    """Return P(continuations of all requests) and what was seen on the way."""
    seen = Seen()
    count = len(case.anchors)
    states: dict[State, float] = {(((),) * count, ((),) * count, freeze(policy)): 1.0}
    finished: dict[tuple[Tokens, ...], float] = defaultdict(float)
    while states:
        seen.last_step += 1
        seen.num_states += len(states)
        following: dict[State, float] = defaultdict(float)
        for state, chance in states.items():
            for after, share in _step(case, state, acceptance, seen):
                if all(len(tokens) >= case.length for tokens in after[0]):
                    finished[after[0]] += chance * share
                else:
                    following[after] += chance * share
        states = following
    return dict(finished), seen


def _step(
    case: Case, state: State, acceptance: Acceptance, seen: Seen
) -> Iterator[tuple[State, float]]:
    committed, carried, frozen = state
    live = [r for r, tokens in enumerate(committed) if len(tokens) < case.length]
    view = _view(case, live)
    anchors = {r: (case.anchors[r], *committed[r])[-1] for r in live}
    policy = thaw(frozen, case.table)
    decision = policy.decide(view)
    decided = freeze(policy)
    mask = decision.draft_mask
    blocks = [
        list(draft_blocks(case, anchors[r], len(committed[r]), carried[r]))
        if mask[i]
        else [(1.0, (), ())]
        for i, r in enumerate(live)
    ]
    plans: dict[bytes, tuple[np.ndarray, bytes]] = {}
    for combination in itertools.product(*blocks):
        share = float(np.prod([chance for chance, _, _ in combination]))
        survivals = np.zeros((len(live), case.toy.num_drafts), np.float32)
        for i, r in enumerate(live):
            if mask[i]:
                block = combination[i][1]
                toy = case.toy
                survivals[i] = (toy.own if case.estimates else toy.survivals)(anchors[r], block)
        key = survivals.tobytes()
        if key not in plans:
            plans[key] = _plan(case, view, decision, decided, survivals, seen)
        lens, planned = plans[key]
        dropped = [
            case.toy.dropped(anchors[r], combination[i][1], int(lens[i]))
            if mask[i] and lens[i] < case.toy.num_drafts
            else np.nan
            for i, r in enumerate(live)
        ]
        context = StepContext(case, view, mask, lens, survivals, tuple(dropped), planned)
        for outcome_share, after in _accept(context, state, live, anchors, combination, acceptance):
            yield after, share * outcome_share


def _view(case: Case, live: list[int]) -> BatchView:
    return BatchView(
        request_keys=tuple(live),
        modes=(case.mode,) * len(live),
        draft_caps=np.full(len(live), case.toy.num_drafts, np.int32),
        num_drafts=case.toy.num_drafts,
        num_prefill_tokens=0,
        rungs=case.table.rungs,
        max_num_tokens=case.table.rungs[-1],
    )


def _plan(
    case: Case,
    view: BatchView,
    decision: DraftDecision,
    decided: bytes,
    survivals: np.ndarray,
    seen: Seen,
) -> tuple[np.ndarray, bytes]:
    policy = thaw(decided, case.table)
    lens = np.zeros(len(view.request_keys), np.int32)
    if decision.draft_mask.any():
        if case.estimates:
            drafted = np.where(decision.draft_mask, view.num_drafts, 0)
            survivals = policy.estimator.survivals(logits_of(survivals), drafted, view.modes)
        lens = policy.plan(view, decision, survivals)
    kind = "probe" if decision.is_probe else "draft" if decision.draft_mask.any() else "plain"
    seen.decisions.add(kind)
    seen.capacities.add(int(lens.sum()))
    return lens, freeze(policy)


@dataclass(frozen=True)
class StepContext:
    """One planned step, for its outcomes."""

    case: Case
    view: BatchView
    mask: np.ndarray
    lens: np.ndarray
    scores: np.ndarray
    """[R, γ] survivals, or confidences where the estimator makes survivals of them."""
    dropped: tuple[float, ...]
    planned: bytes


def logits_of(confidences: np.ndarray) -> np.ndarray:
    """[R, γ] float32 logits; −inf where nothing is drafted."""
    with np.errstate(divide="ignore"):
        return np.log(confidences / (1.0 - confidences)).astype(np.float32)


def _accept(
    step: StepContext,
    state: State,
    live: list[int],
    anchors: dict[int, int],
    combination: tuple[tuple[float, Tokens, Noise], ...],
    acceptance: Acceptance,
) -> Iterator[tuple[float, State]]:
    case, lens = step.case, step.lens
    one_hot = case.mode is not DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS

    def outcomes_of(i: int, r: int) -> Iterator[tuple[float, int, int]]:
        drafts, used = combination[i][1:]
        if case.is_seeded:
            noise, position = (*state[1][r], *used), len(state[0][r])
            return accept_coupled(case, anchors[r], drafts, int(lens[i]), position, noise)
        return acceptance(case.toy, anchors[r], drafts, int(lens[i]), one_hot)

    outcomes = [[o for o in outcomes_of(i, r) if o[0] > 0.0] for i, r in enumerate(live)]
    observed: dict[Tokens, bytes] = {}
    for joint in itertools.product(*outcomes):
        accepted = tuple(o[1] for o in joint)
        if accepted not in observed:
            observed[accepted] = _observe(step, accepted)
        tokens, noise = list(state[0]), list(state[1])
        for i, r in enumerate(live):
            block = combination[i][1][: accepted[i]]
            tokens[r] = (*tokens[r], *block, joint[i][2])[: case.length]
            position = len(tokens[r])
            merged = dict((*noise[r], *combination[i][2]))
            noise[r] = tuple(sorted((k, u) for k, u in merged.items() if k > position))
        share = float(np.prod([o[0] for o in joint]))
        yield share, (tuple(tokens), tuple(noise), observed[accepted])


def _observe(step: StepContext, accepted: Tokens) -> bytes:
    case, lens, mask = step.case, step.lens, step.mask
    policy = thaw(step.planned, case.table)
    if not learns(policy):
        return step.planned
    whole = np.array(accepted) == lens
    outcome = StepOutcome(
        request_keys=step.view.request_keys,
        verify_lens=lens.astype(np.int32),
        accepted_lens=np.array(accepted, np.int32),
        draft_lens=np.where(mask, case.toy.num_drafts, 0).astype(np.int32),
        confidence_logits=logits_of(step.scores) if case.estimates and mask.any() else None,
        modes=step.view.modes,
        dropped_accept_probs=np.where(whole, step.dropped, np.nan).astype(np.float32),
        rung=len(lens) + int(lens.sum()),
        num_prefill_tokens=0,
        drafted=bool(mask.any()),
        step_ms=(0.5 + sum(accepted)) * (len(lens) + int(lens.sum())) if case.is_timed else 0.0,
    )
    if case.estimates:
        policy.estimator.observe(outcome)
    policy.observe(outcome)
    return freeze(policy)
