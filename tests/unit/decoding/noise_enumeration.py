# SPDX-License-Identifier: Apache-2.0
"""Exact enumeration of speculative decoding over its own keyed noise, on a toy vocabulary.

`EnumeratedNoise` takes the place of `noise.keyed_uniforms`. Each key (purpose, position, slot) that
the code under test asks for is a random variable; [0, 1) is cut at every breakpoint that the tables
can produce, and a *path* fixes one cell (midpoint, exact weight) per key. A key asked for twice
gives the same number twice, so reused noise is enumerated as reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch

from trtllm_dspark.decoding.acceptance import AcceptanceBatch, SequenceView, accept
from trtllm_dspark.ops import noise
from trtllm_dspark.ops.sample_tokens import sample_drafts
from trtllm_dspark.types import SamplingParams

Key = tuple[int, int, int]
"""(purpose, position, slot)"""
PARAMS = SamplingParams(temperature=1.0, max_tokens=64)


@dataclass(frozen=True)
class Tables:
    """Next-token distributions [V, V], row = previous token. Rows that sum to 1."""

    target: np.ndarray
    drafter: np.ndarray

    def cells(self, samples_drafts: bool) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Per purpose: midpoints and widths of the cells on which every decision is constant."""
        if samples_drafts:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.nan_to_num(self.target / self.drafter)
            residual = np.maximum(self.target - self.drafter, 0.0)
        else:
            drafts = self.drafter.argmax(axis=1)[:, None]
            ratios = np.take_along_axis(self.target, drafts, axis=1)
            residual = self.target.copy()
            np.put_along_axis(residual, drafts, 0.0, axis=1)
        finals = np.concatenate([self.target, residual[residual.sum(axis=1) > 0]])
        return {
            int(noise.Purpose.DRAFT_UNIFORM): _cells(_steps(self.drafter)),
            int(noise.Purpose.ACCEPT): _cells(ratios.ravel()),
            int(noise.Purpose.FINAL): _cells(_steps(finals)),
        }

    def continuation_probs(self, anchor: int, num_tokens: int) -> dict[tuple[int, ...], float]:
        """The target's own distribution over whole continuations."""
        probs = {(): 1.0}
        for _ in range(num_tokens):
            probs = {
                (*tokens, x): weight * self.target[tokens[-1] if tokens else anchor, x]
                for tokens, weight in probs.items()
                for x in range(len(self.target))
            }
        return probs


def _steps(weights: np.ndarray) -> np.ndarray:
    return (np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)).ravel()


def _cells(breakpoints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inner = np.sort(breakpoints[(breakpoints > 1e-9) & (breakpoints < 1.0 - 1e-9)])
    inner = inner[np.diff(inner, prepend=-1.0) > 1e-12]
    edges = np.concatenate([[0.0], inner, [1.0]])
    return (edges[:-1] + edges[1:]) / 2, np.diff(edges)


@dataclass
class Paths:
    """Partial runs, one per row: tokens, exact weight, what a policy remembers, noise so far."""

    tokens: np.ndarray
    """[P, 1 + n + γ + 1] anchor and continuation, −1 beyond lens."""
    lens: np.ndarray
    """[P] tokens committed, the first anchor included."""
    weights: np.ndarray
    memory: np.ndarray
    """[P, γ] drafts of the step before, −1 before the first step."""
    noise: dict[Key, np.ndarray] = field(default_factory=dict)
    """Value of each key on each path; NaN = not drawn on this path."""

    def take(self, index: np.ndarray) -> Paths:
        """Rows by index; an index that repeats copies."""
        values = {key: column[index] for key, column in self.noise.items()}
        rows = (self.tokens[index], self.lens[index], self.weights[index], self.memory[index])
        return Paths(*rows, values)


class EnumeratedNoise:
    """Stands in for `noise.keyed_uniforms`; a request's seed is the index of its path."""

    def __init__(self, paths: Paths, rename: Callable[[Key], Key]) -> None:
        self.paths, self.rename = paths, rename
        self.missing: dict[Key, np.ndarray] = {}

    def keyed_uniforms(
        self, seeds: np.ndarray, positions: np.ndarray, slots: np.ndarray, purpose: int
    ) -> np.ndarray:
        """Values of the keys; those not drawn yet are noted as missing and come out as 0.5."""
        paths, at, slot = np.broadcast_arrays(seeds, positions, slots)
        values = np.full(paths.shape, 0.5)
        for position, number in {(int(p), int(s)) for p, s in zip(at.flat, slot.flat, strict=True)}:
            key = self.rename((int(purpose), position, number))
            here = (at == position) & (slot == number)
            column = self.paths.noise.get(key)
            drawn = np.full(len(self.paths.lens), np.nan) if column is None else column
            wanted = paths[here].astype(np.int64)
            values[here] = np.nan_to_num(drawn[wanted], nan=0.5)
            lacking = wanted[np.isnan(drawn[wanted])]
            if lacking.size:
                mask = self.missing.setdefault(key, np.zeros(len(drawn), dtype=np.bool_))
                mask[lacking] = True
        return values


LenRule = Callable[[int, Paths, np.ndarray], np.ndarray]
"""(step, paths, this step's drafts [P, γ]) → verify_lens [P]"""


@dataclass(frozen=True)
class Run:
    """What is enumerated: tables, γ, how drafts come about and how many of them are verified."""

    tables: Tables
    num_drafts: int
    samples_drafts: bool
    verify_lens: LenRule
    anchor: int = 0
    num_tokens: int = 3
    rename: Callable[[Key], Key] = lambda key: key
    """Identity for the code as it is; mutants map keys onto each other."""
    is_alive: Callable[[Key, int], bool] = lambda key, anchor_position: key[1] >= anchor_position
    """Whether a key may be asked for again once the anchor is at this position."""


def enumerate_continuations(run: Run) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first `num_tokens` tokens that speculative decoding emits."""
    width = 1 + run.num_tokens + run.num_drafts + 1
    paths = Paths(
        tokens=np.full((1, width), -1),
        lens=np.ones(1, dtype=np.int64),
        weights=np.ones(1),
        memory=np.full((1, run.num_drafts), -1),
    )
    paths.tokens[0, 0] = run.anchor
    finished: dict[tuple[int, ...], float] = {}
    step = 0
    while len(paths.lens):
        paths = _merge(_one_step(run, paths, step), run)
        is_done = paths.lens > run.num_tokens
        for i in np.nonzero(is_done)[0]:
            tokens = tuple(int(t) for t in paths.tokens[i, 1 : run.num_tokens + 1])
            finished[tokens] = finished.get(tokens, 0.0) + float(paths.weights[i])
        paths = paths.take(np.nonzero(~is_done)[0])
        step += 1
    return finished


def _one_step(run: Run, paths: Paths, step: int) -> Paths:
    """Draft, verify and accept on every path, splitting paths until no noise is missing."""
    cells = run.tables.cells(run.samples_drafts)
    while True:
        source = EnumeratedNoise(paths, run.rename)
        with mock.patch.object(noise, "keyed_uniforms", source.keyed_uniforms):
            drafts = _draft(run, paths)
            if not source.missing:
                lens = run.verify_lens(step, paths, drafts)
                committed, counts = _accept(run, paths, drafts, lens)
        if not source.missing:
            break
        origin = np.arange(len(paths.lens))
        for key, is_missing in source.missing.items():
            paths, rows = _split(paths, key, is_missing[origin], *cells[key[0]])
            origin = origin[rows]
    for j in range(committed.shape[1]):
        used = np.nonzero(j < counts)[0]
        paths.tokens[used, paths.lens[used] + j] = committed[used, j]
    paths.lens = paths.lens + counts
    paths.memory = drafts
    return paths


def _split(
    paths: Paths, key: Key, is_missing: np.ndarray, midpoints: np.ndarray, widths: np.ndarray
) -> tuple[Paths, np.ndarray]:
    """One path per cell where the key is missing; returns the paths and the rows they came from."""
    sizes = np.where(is_missing, len(midpoints), 1)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    cell = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    old = paths.noise.get(key, np.full(len(sizes), np.nan))
    new = paths.take(rows)
    new.noise[key] = np.where(is_missing[rows], midpoints[cell], old[rows])
    new.weights = new.weights * np.where(is_missing[rows], widths[cell], 1.0)
    return new, rows


def _draft(run: Run, paths: Paths) -> np.ndarray:
    """Drafts [P, γ]: drawn from the drafter's table by the product's own code, or its arg-max."""
    num_paths = len(paths.lens)
    previous = paths.tokens[np.arange(num_paths), paths.lens - 1]
    drafts = np.empty((num_paths, run.num_drafts), dtype=np.int32)
    for slot in range(run.num_drafts):
        q = run.tables.drafter[previous]
        if run.samples_drafts:
            seeds = np.arange(num_paths, dtype=np.uint64)
            coupled = np.zeros(num_paths, dtype=np.bool_)
            ids = sample_drafts(torch.from_numpy(q), seeds, paths.lens - 1, slot, coupled)
            previous = ids.numpy()
        else:
            previous = q.argmax(axis=1)
        drafts[:, slot] = previous
    return drafts


def _accept(
    run: Run, paths: Paths, drafts: np.ndarray, verify_lens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run the product's `accept`; returns (token_ids [P, γ+1], num_tokens [P])."""
    num_paths, num_drafts = drafts.shape
    anchors = paths.tokens[np.arange(num_paths), paths.lens - 1]
    fed = np.concatenate([anchors[:, None], drafts], axis=1)
    is_fed = np.arange(num_drafts + 1)[None] <= verify_lens[:, None]
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(run.tables.target[fed[is_fed]]))
    q = run.tables.drafter[fed[:, :-1]]
    batch = AcceptanceBatch(
        cu_rows=np.concatenate([[0], np.cumsum(verify_lens + 1)]).astype(np.int32),
        draft_token_ids=drafts,
        draft_lens=np.full(num_paths, num_drafts, dtype=np.int32),
        draft_probs=torch.from_numpy(q) if run.samples_drafts else None,
        sampled=np.full(num_paths, run.samples_drafts),
        sequences=[
            SequenceView(tokens[:size], 1, PARAMS, i, False)
            for i, (tokens, size) in enumerate(zip(paths.tokens, paths.lens, strict=True))
        ],
    )
    result = accept(logits, batch)
    return result.token_ids, result.num_tokens


def _merge(paths: Paths, run: Run) -> Paths:
    """Join paths whose future is the same: equal tokens, memory and noise that is still alive."""
    columns = [paths.tokens, paths.lens[:, None], paths.memory]
    kept: dict[Key, np.ndarray] = {}
    for key, column in paths.noise.items():
        alive = np.array([run.is_alive(key, int(size) - 1) for size in paths.lens])
        value = np.where(alive, column, np.nan)
        if not np.isnan(value).all():
            kept[key] = value
    columns += [np.nan_to_num(value, nan=-1.0)[:, None] for value in kept.values()]
    _, first, group = np.unique(
        np.concatenate(columns, axis=1), axis=0, return_index=True, return_inverse=True
    )
    merged = Paths(paths.tokens, paths.lens, paths.weights, paths.memory, kept).take(first)
    merged.weights = np.bincount(group.ravel(), weights=paths.weights)
    return merged
