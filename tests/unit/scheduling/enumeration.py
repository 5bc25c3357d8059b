# SPDX-License-Identifier: Apache-2.0
"""Exact enumeration of speculative decoding on toy tables: real policy objects, an independent
acceptance rule, every outcome of the keyed draft noise, equal states merged.

`output_distribution` returns the distribution of whole continuations of R requests; a policy is
lossless iff it equals `target_distribution`, the one of plain sampling.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision
from trtllm_dspark.types import DraftMode, StepOutcome

Tokens = tuple[int, ...]
Noise = tuple[tuple[Any, float], ...]
Acceptance = Callable[["Toy", int, Tokens, int, bool], Iterator[tuple[float, int, int]]]


@dataclass(frozen=True)
class Toy:
    """Tables over V tokens; every row depends on the previous token."""

    target: np.ndarray
    """[V, V] p(next | previous)."""
    draft: np.ndarray
    """[V, V] q(next | previous)."""
    confidences: np.ndarray
    """[γ, V] c_k given x_{k−1} (the anchor for k = 1): never a function of x_k."""
    score: Callable[[Toy, int, Tokens], np.ndarray] | None = None
    """Replaces the confidences by anything at all: for mutants."""

    @property
    def num_drafts(self) -> int:
        return len(self.confidences)

    def survivals(self, anchor: int, drafts: Tokens) -> np.ndarray:
        """[γ] float32 survivals of one block."""
        if self.score is not None:
            return self.score(self, anchor, drafts)
        before = (anchor, *drafts[:-1])
        own = [self.confidences[k, token] for k, token in enumerate(before)]
        return np.cumprod(np.array(own, np.float32))


@dataclass(frozen=True)
class Case:
    """One enumeration: requests, horizon, mode, costs."""

    toy: Toy
    table: LatencyTable
    mode: DraftMode
    anchors: Tokens = (0,)
    length: int = 6
    """Tokens of every continuation; a request leaves once it has them."""
    reuse_noise: bool = False
    """Mutant: draft noise keyed by absolute position instead of (anchor position, slot)."""


@dataclass
class Seen:
    """What happened on the way, for the tests' own sanity."""

    capacities: set[int] = field(default_factory=set)
    decisions: set[str] = field(default_factory=set)
    num_states: int = 0
    last_step: int = 0


# --- acceptance -----------------------------------------------------------------------------------


def accept_exactly(
    toy: Toy, anchor: int, drafts: Tokens, verify_len: int, one_hot: bool
) -> Iterator[tuple[float, int, int]]:
    """Yield (probability, accepted length, last token): accept min(1, p/q), then residual."""
    chance, previous = 1.0, anchor
    for k, token in enumerate(drafts[:verify_len]):
        p = toy.target[previous]
        q = np.eye(len(p))[token] if one_hot else toy.draft[previous]
        accept = min(1.0, p[token] / q[token])
        residual = np.maximum(p - q, 0.0)
        if accept < 1.0:
            for other, share in enumerate(residual / residual.sum()):
                yield chance * (1.0 - accept) * share, k, other
        chance, previous = chance * accept, token
    for token, share in enumerate(toy.target[previous]):
        yield chance * share, verify_len, token


def accept_with_residual_after_truncation(
    toy: Toy, anchor: int, drafts: Tokens, verify_len: int, one_hot: bool
) -> Iterator[tuple[float, int, int]]:
    """Mutant: a truncated block draws its extra token from the residual at row ℓ."""
    for chance, accepted, token in accept_exactly(toy, anchor, drafts, verify_len, one_hot):
        truncated = accepted == verify_len < toy.num_drafts
        if not truncated:
            yield chance, accepted, token
        elif token == 0:
            previous = (anchor, *drafts)[verify_len]
            p = toy.target[previous]
            q = toy.draft[previous]
            residual = np.maximum(p - q, 0.0)
            residual = residual / residual.sum() if residual.sum() > 0 else p
            for other, share in enumerate(residual):
                yield chance / p[0] * share, accepted, other


# --- drafts ---------------------------------------------------------------------------------------


def noise_atoms(toy: Toy) -> list[tuple[float, float]]:
    """Return (probability, midpoint) of the intervals of u that no row of q tells apart."""
    edges = sorted({0.0, 1.0, *np.cumsum(toy.draft, axis=1)[:, :-1].ravel().tolist()})
    return [(b - a, (a + b) / 2) for a, b in itertools.pairwise(edges) if b > a]


def draw(row: np.ndarray, u: float) -> int:
    return int(np.searchsorted(np.cumsum(row), u, side="right"))


def draft_blocks(
    case: Case, anchor: int, position: int, carried: Noise
) -> Iterator[tuple[float, Tokens, Noise]]:
    """Yield (probability, drafts, noise used by key) of one block drafted at `position`."""
    toy = case.toy
    if case.mode is not DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS:
        drafts, previous = [], anchor
        for _ in range(toy.num_drafts):
            previous = int(np.argmax(toy.draft[previous]))
            drafts.append(previous)
        yield 1.0, tuple(drafts), ()
        return
    known = dict(carried)
    blocks: list[tuple[float, Tokens, Noise]] = [(1.0, (), ())]
    for slot in range(1, toy.num_drafts + 1):
        key = position + slot if case.reuse_noise else (position, slot)
        atoms = [(1.0, known[key])] if key in known else noise_atoms(toy)
        longer: dict[tuple[Tokens, Noise], float] = defaultdict(float)
        for chance, drafts, used in blocks:
            previous = drafts[-1] if drafts else anchor
            for share, u in atoms:
                token = draw(toy.draft[previous], u)
                kept = (*used, (key, u)) if case.reuse_noise else ()
                longer[((*drafts, token), kept)] += chance * share
        blocks = [(chance, drafts, used) for (drafts, used), chance in longer.items()]
    yield from blocks


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
                survivals[i] = case.toy.survivals(anchors[r], combination[i][1])
        key = survivals.tobytes()
        if key not in plans:
            plans[key] = _plan(case, view, decision, decided, survivals, seen)
        lens, planned = plans[key]
        for outcome_share, after in _accept(
            case, state, live, anchors, combination, lens, planned, acceptance, view, mask
        ):
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
        lens = policy.plan(view, decision, survivals)
    kind = "probe" if decision.is_probe else "draft" if decision.draft_mask.any() else "plain"
    seen.decisions.add(kind)
    seen.capacities.add(int(lens.sum()))
    return lens, freeze(policy)


def _accept(
    case: Case,
    state: State,
    live: list[int],
    anchors: dict[int, int],
    combination: tuple[tuple[float, Tokens, Noise], ...],
    lens: np.ndarray,
    planned: bytes,
    acceptance: Acceptance,
    view: BatchView,
    mask: np.ndarray,
) -> Iterator[tuple[float, State]]:
    one_hot = case.mode is not DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS
    outcomes = [
        [
            o
            for o in acceptance(case.toy, anchors[r], combination[i][1], int(lens[i]), one_hot)
            if o[0] > 0.0
        ]
        for i, r in enumerate(live)
    ]
    observed: dict[Tokens, bytes] = {}
    for joint in itertools.product(*outcomes):
        accepted = tuple(o[1] for o in joint)
        if accepted not in observed:
            observed[accepted] = _observe(case, view, mask, lens, accepted, planned)
        tokens, noise = list(state[0]), list(state[1])
        for i, r in enumerate(live):
            block = combination[i][1][: accepted[i]]
            tokens[r] = (*tokens[r], *block, joint[i][2])[: case.length]
            position = len(tokens[r])
            merged = dict((*noise[r], *combination[i][2]))
            noise[r] = tuple(sorted((k, u) for k, u in merged.items() if k > position))
        share = float(np.prod([o[0] for o in joint]))
        yield share, (tuple(tokens), tuple(noise), observed[accepted])


def _observe(
    case: Case,
    view: BatchView,
    mask: np.ndarray,
    lens: np.ndarray,
    accepted: Tokens,
    planned: bytes,
) -> bytes:
    policy = thaw(planned, case.table)
    if not learns(policy):
        return planned
    policy.observe(
        StepOutcome(
            request_keys=view.request_keys,
            verify_lens=lens.astype(np.int32),
            accepted_lens=np.array(accepted, np.int32),
            draft_lens=np.where(mask, case.toy.num_drafts, 0).astype(np.int32),
            confidence_logits=None,
            modes=view.modes,
            dropped_accept_probs=np.full(len(lens), np.nan, np.float32),
            rung=len(lens) + int(lens.sum()),
            num_prefill_tokens=0,
            drafted=bool(mask.any()),
            step_ms=1.0,
        )
    )
    return freeze(policy)


# --- references -----------------------------------------------------------------------------------


def target_distribution(case: Case) -> dict[tuple[Tokens, ...], float]:
    """Return the distribution of plain sampling: requests are independent."""
    single = []
    for anchor in case.anchors:
        paths: dict[Tokens, float] = {(): 1.0}
        for _ in range(case.length):
            longer = {}
            for tokens, chance in paths.items():
                for token, share in enumerate(case.toy.target[(anchor, *tokens)[-1]]):
                    if share > 0.0:
                        longer[(*tokens, token)] = chance * share
            paths = longer
        single.append(paths)
    joint: dict[tuple[Tokens, ...], float] = {}
    for combination in itertools.product(*(paths.items() for paths in single)):
        joint[tuple(t for t, _ in combination)] = float(np.prod([c for _, c in combination]))
    return joint


def deviation(case: Case, found: dict[tuple[Tokens, ...], float]) -> float:
    """Return the largest difference of a continuation's probability from plain sampling's."""
    expected = target_distribution(case)
    keys = set(expected) | set(found)
    return max(abs(expected.get(key, 0.0) - found.get(key, 0.0)) for key in keys)


def first_token_share(found: dict[tuple[Tokens, ...], float], token: int = 0) -> float:
    """Return P(first token of the first request = token)."""
    return sum(chance for tokens, chance in found.items() if tokens[0][0] == token)
