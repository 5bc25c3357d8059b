# SPDX-License-Identifier: Apache-2.0
"""Tapped states kept for later: one tensor that grows, one copy per step for all requests.

Rows have their own memory: neither a step's output nor the rows of ended requests stay alive with
them. Knows rows, not requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]


class KeptRows:
    """A pool of rows [*, W] in the dtype and on the device of what is kept."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._free = np.empty(0, np.int64)
        self._num_free = 0

    @property
    def num_rows(self) -> int:
        """Rows held now."""
        return len(self._free) - self._num_free

    @property
    def size(self) -> int:
        """Rows that there is memory for."""
        return len(self._free)

    def add(self, taps: torch.Tensor, rows: Int64Array) -> Int64Array:
        """Copy these rows of taps [N, W]; returns where each of them went."""
        kept = self._reserve(taps, len(rows))
        self._num_free -= len(rows)
        places = self._free[self._num_free : self._num_free + len(rows)].copy()
        chosen = taps.index_select(0, _index(rows, taps.device))
        kept.index_copy_(0, _index(places, kept.device), chosen)
        return places

    def take(self, places: Int64Array) -> torch.Tensor:
        """Rows [len(places), W], in this order; they are free from now on."""
        assert self._rows is not None, "nothing was kept"
        taken = self._rows.index_select(0, _index(places, self._rows.device))
        self.free(places)
        return taken

    def free(self, places: Int64Array) -> None:
        """Forget rows."""
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    def _reserve(self, taps: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The tensor, with room for that many rows more."""
        if self._rows is not None and self._num_free >= num_rows:
            return self._rows
        old, wanted = len(self._free), self.num_rows + num_rows
        size = max(wanted, 2 * old)
        grown = taps.new_empty((size, taps.shape[1]))
        if self._rows is not None:
            grown[:old] = self._rows
        free = np.empty(size, np.int64)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + size - old] = np.arange(old, size)
        self._rows, self._free, self._num_free = grown, free, self._num_free + size - old
        return grown


def _index(rows: Int64Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows).to(device)
