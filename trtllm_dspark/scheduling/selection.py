# SPDX-License-Identifier: Apache-2.0
"""Selection of the drafts to verify: top-K survivals under caps. The numpy reference of the op
`select_drafts`. Knows survivals, caps and a capacity; not where the capacity came from.
"""

from __future__ import annotations

import numpy as np

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.types import FloatArray, IntArray


def select_drafts(survivals: FloatArray, capacity: int, caps: IntArray) -> IntArray:
    """Return verify_lens [R] int32: the `capacity` drafts of highest survival.

    Ties go by (position, request). survivals [R, γ] must not increase along γ; 0 means not drafted
    and is never chosen; slots beyond caps[r] are inadmissible. Prefix-closed by construction: a
    prefix never ranks below its extension.
    Example, R=3, capacity 3, caps [2, 2, 1]: [[.9, .5], [.5, .4], [.2, 0]] → [2, 1, 0].
    """
    num_requests, num_drafts = survivals.shape
    check_survivals(survivals)
    admissible = (np.arange(num_drafts) < np.asarray(caps)[:, None]) & (survivals > 0)
    if capacity >= int(admissible.sum()):
        return admissible.sum(axis=1, dtype=np.int32)
    if capacity <= 0:
        return np.zeros(num_requests, np.int32)
    by_position = np.where(admissible, survivals, np.float32(-1.0)).T.ravel()
    threshold = np.partition(by_position, by_position.size - capacity)[by_position.size - capacity]
    above = by_position > threshold
    ties = np.flatnonzero(by_position == threshold)[: capacity - int(above.sum())]
    above[ties] = True
    return above.reshape(num_drafts, num_requests).sum(axis=0, dtype=np.int32)


def check_survivals(survivals: FloatArray) -> None:
    """Refuse NaN, values outside [0, 1] and rows that increase along γ."""
    if survivals.size == 0:
        return
    low, high = survivals.min(), survivals.max()
    if not (low >= 0.0 and high <= 1.0):
        raise ConfigError(
            f"survivals range over {low}..{high}: they must be probabilities in [0, 1], not NaN; "
            f"check the confidence logits of the drafter"
        )
    if (survivals[:, 1:] > survivals[:, :-1]).any():
        raise ConfigError(
            "survivals increase along the draft positions of a request: they must be cumulative "
            "products; pass survivals, not confidences"
        )


def fit_caps(caps: IntArray, capacity: int) -> IntArray:
    """Cut caps [R] to at most `capacity` in all: deepest positions first, then later requests.

    Example: caps [3, 1, 2], capacity 4 → [2, 1, 1].
    """
    total = int(caps.sum())
    if total <= max(capacity, 0):
        return caps.astype(np.int32)
    depth = int(caps.max())
    slots = np.arange(depth)[:, None] < caps[None, :]
    kept = slots & (np.cumsum(slots.ravel()).reshape(slots.shape) <= max(capacity, 0))
    return kept.sum(axis=0, dtype=np.int32)
