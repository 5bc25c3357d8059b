# SPDX-License-Identifier: Apache-2.0
"""Survivals of past drafts per request, recalled only when they are old enough (the asynchronous
barrier of DSpark §5.2). Knows request keys and step numbers; nothing of costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import require
from trtllm_dspark.scheduling.policy import BatchView
from trtllm_dspark.types import FloatArray

NEVER = -(1 << 40)


class SurvivalHistory:
    """A ring of the last survivals of every request.

    Step t may recall what was recorded in steps ≤ t − `staleness`. The newest of these stays until
    a newer one comes: forgetting it would mean trying hopeless requests again and again. Further
    samples older than `max_age` steps give way.
    """

    def __init__(self, num_samples: int, staleness: int = 2, max_age: int = 64) -> None:
        require(num_samples >= 1, "num_samples", num_samples, "≥ 1")
        require(staleness >= 1, "staleness", staleness, "≥ 1 (current survivals never decide)")
        require(max_age > staleness, "max_age", max_age, f"> staleness ({staleness})")
        self.step = 0
        self.last_recorded = NEVER
        """Step of the newest survivals of anybody."""
        self.num_samples, self.staleness, self.max_age = num_samples, staleness, max_age
        self._depth = num_samples + staleness - 1
        self._slot_of: dict[int, int] = {}
        self._values = np.zeros((0, self._depth, 0), np.float32)
        self._steps = np.full((0, self._depth), NEVER, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._keys: tuple[int, ...] = ()
        self._pending: tuple[BatchView, npt.NDArray[np.bool_]] | None = None
        self._slots = np.zeros(0, np.int64)
        self._starts = np.zeros(0, np.int64)

    def begin_step(self) -> None:
        """Advance the clock: called once per `decide`."""
        self.step += 1

    def record(
        self, view: BatchView, drafted: npt.NDArray[np.bool_], survivals: FloatArray
    ) -> None:
        """Remember this step's survivals [R, γ] of the drafted requests."""
        self._pending = None
        slots = self._slots_for(view)[drafted]
        column = self._counts[slots] % self._depth
        self._values[slots, column] = survivals[drafted]
        self._steps[slots, column] = self.step
        self._counts[slots] += 1
        if len(slots):
            self.last_recorded = self.step

    def record_decision(self, view: BatchView, drafted: npt.NDArray[np.bool_]) -> None:
        """Note whom this step drafts for; `settle` fills in for a drafter that proposes nothing."""
        self._pending = (view, drafted) if drafted.any() else None

    def settle(self, request_keys: tuple[int, ...]) -> None:
        """Record zeros where drafting was decided and no survivals came (no proposal at all)."""
        pending, self._pending = self._pending, None
        if pending is not None and pending[0].request_keys == request_keys:
            view, drafted = pending
            self.record(view, drafted, np.zeros((len(drafted), view.num_drafts), np.float32))

    def recall(
        self, view: BatchView, prior: Callable[[BatchView], FloatArray], num_samples: int = 1
    ) -> FloatArray:
        """Return [M, R, γ]: the newest M admissible samples of every request, newest first.

        prior(view) [R, γ], asked for only where needed, stands in for a request without any; one
        with fewer fresh samples than M fills up with the mean of its newest sample and the prior.
        """
        slots = self._slots_for(view)
        counts, barrier = self._counts[slots], self.step - self.staleness
        flat_steps = self._steps.reshape(-1)
        newest = counts - 1
        for _ in range(self.staleness - 1):  # skip what is younger than the barrier
            newest = newest - (flat_steps.take(self._starts + newest % self._depth) > barrier)
        if num_samples == 1:
            cells = self._starts + newest % self._depth
            steps = flat_steps.take(cells)
            known = (steps <= barrier) & (steps != NEVER)
            rows = self._values.reshape(-1, view.num_drafts).take(cells, 0)
            if not known.all():
                rows = np.where(known[:, None], rows, prior(view))
            return rows[None]
        back_by = (counts - 1 - newest) + np.arange(num_samples)[:, None]
        column = (counts - 1 - back_by) % self._depth
        steps = self._steps[slots, column]
        fresh = (steps <= barrier) & (steps >= self.step - self.max_age) & (back_by < self._depth)
        fresh[0] = (steps[0] <= barrier) & (steps[0] != NEVER)
        values = self._values[slots, column]
        if fresh.all():
            return values
        expected = prior(view)
        stand_in = np.where(fresh[0][:, None], 0.5 * (values[0] + expected), expected)
        return np.where(fresh[..., None], values, stand_in)

    def _slots_for(self, view: BatchView) -> npt.NDArray[np.int64]:
        if view.request_keys != self._keys:
            fresh = [key for key in view.request_keys if key not in self._slot_of]
            if fresh:
                self._make_room(len(fresh), view)
                free = iter(sorted(set(range(len(self._counts))) - set(self._slot_of.values())))
                for key in fresh:
                    slot = next(free)
                    self._slot_of[key] = slot
                    self._steps[slot], self._counts[slot] = NEVER, 0
            self._slots = np.array([self._slot_of[k] for k in view.request_keys], np.int64)
            self._starts = self._slots * self._depth
            self._keys = view.request_keys
        return self._slots

    def _make_room(self, num_fresh: int, view: BatchView) -> None:
        """Forget finished requests (unseen for `max_age` steps), then grow by doubling."""
        if self._values.shape[2] != view.num_drafts:
            self._values = np.zeros((len(self._counts), self._depth, view.num_drafts), np.float32)
            self._steps[:] = NEVER
        if len(self._slot_of) + num_fresh <= len(self._counts):
            return
        present, oldest = set(view.request_keys), self.step - self.max_age
        self._slot_of = {
            key: slot
            for key, slot in self._slot_of.items()
            if key in present or self._steps[slot].max() >= oldest
        }
        missing = len(self._slot_of) + num_fresh - len(self._counts)
        if missing > 0:
            more = max(missing, len(self._counts), 8)
            self._values = np.concatenate(
                [self._values, np.zeros((more, *self._values.shape[1:]), np.float32)]
            )
            self._steps = np.concatenate([self._steps, np.full((more, self._depth), NEVER)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
