# SPDX-License-Identifier: Apache-2.0
"""Toy tables for exact enumeration: target, drafter and confidences over a few tokens, the keyed
draft noise in all its outcomes, an independent acceptance rule, and plain sampling as reference.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.types import DraftMode

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

    def own(self, anchor: int, drafts: Tokens) -> np.ndarray:
        """[γ] confidences c_k of one block."""
        before = (anchor, *drafts[:-1])
        return np.array([self.confidences[k, token] for k, token in enumerate(before)], np.float32)

    def survivals(self, anchor: int, drafts: Tokens) -> np.ndarray:
        """[γ] float32 survivals of one block."""
        if self.score is not None:
            return self.score(self, anchor, drafts)
        return np.cumprod(self.own(anchor, drafts))

    def dropped(self, anchor: int, drafts: Tokens, verify_len: int) -> float:
        """Acceptance probability of the first dropped draft (sampled drafts)."""
        previous, token = (anchor, *drafts)[verify_len], drafts[verify_len]
        return min(1.0, self.target[previous, token] / self.draft[previous, token])


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
    estimates: bool = False
    """Survivals come from the policy's own estimator, which learns from every step."""
    is_seeded: bool = False
    """Coupled acceptance: token t is drawn from u[t] whoever draws it, draft or target."""
    is_timed: bool = False
    """Steps take times that tell how much was accepted; without, they are not timed."""

    @property
    def noise_by_position(self) -> bool:
        """Whether draft noise is keyed by the absolute position of the token it draws."""
        return self.reuse_noise or self.is_seeded

    def noise_atoms(self) -> list[tuple[float, float]]:
        """Return (probability, midpoint) of the intervals of u that no row in use tells apart."""
        rows = [self.toy.draft, *([self.toy.target] if self.is_seeded else [])]
        inner = np.cumsum(np.concatenate(rows), axis=1)[:, :-1].round(12).ravel()
        edges = sorted({0.0, 1.0, *inner.tolist()})
        return [(b - a, (a + b) / 2) for a, b in itertools.pairwise(edges) if b > a]


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


def accept_coupled(
    case: Case, anchor: int, drafts: Tokens, verify_len: int, position: int, noise: Noise
) -> Iterator[tuple[float, int, int]]:
    """Yield outcomes of a seeded request: a draft stays iff it is what its u draws from p."""
    known, previous = dict(noise), anchor
    for k, token in enumerate(drafts[:verify_len]):
        truth = draw(case.toy.target[previous], known[position + k + 1])
        if truth != token:
            yield 1.0, k, truth
            return
        previous = token
    key = position + verify_len + 1
    for share, u in [(1.0, known[key])] if key in known else case.noise_atoms():
        yield share, verify_len, draw(case.toy.target[previous], u)


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
        key = position + slot if case.noise_by_position else (position, slot)
        atoms = [(1.0, known[key])] if key in known else case.noise_atoms()
        longer: dict[tuple[Tokens, Noise], float] = defaultdict(float)
        for chance, drafts, used in blocks:
            previous = drafts[-1] if drafts else anchor
            for share, u in atoms:
                token = draw(toy.draft[previous], u)
                kept = (*used, (key, u)) if case.noise_by_position else ()
                longer[((*drafts, token), kept)] += chance * share
        blocks = [(chance, drafts, used) for (drafts, used), chance in longer.items()]
    yield from blocks


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
