# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and logit margins of the tokens that a step commits.

A log-probability is the natural logarithm under the processed distribution (bias, temperature,
penalties, masks) over the whole vocabulary, *before* top-k, top-p and min-p: what TensorRT-LLM
returns with normalize_log_probs=false. With its default the values of a greedy request would all be
0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.ops.filter_probs import filtered_weights
from trtllm_dspark.types import FloatArray

_CHUNK_ROWS = 16
"""Rows that are worked on together: few enough to stay in a CPU's cache."""
_MIN_SCAN_SIZE = 4096
"""Vocabulary from which two scans of a CPU row beat torch's top-k."""


def token_log_probs(
    logits: torch.Tensor,
    scale: npt.NDArray[np.float64],
    rows: npt.NDArray[np.integer],
    token_ids: npt.NDArray[np.integer],
) -> FloatArray:
    """Return ln softmax(logits[row] · scale)[token] for n rows: scale, rows and token_ids [n]."""
    log_probs = np.empty(len(rows), dtype=np.float32)
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        chunk = logits[torch.from_numpy(np.asarray(rows[part])).to(logits.device)]
        by = torch.from_numpy(scale[part]).to(logits.device)
        ids = torch.from_numpy(np.asarray(token_ids[part], dtype=np.int64)).to(logits.device)
        largest = chunk.amax(dim=-1)
        picked = (chunk.gather(1, ids[:, None])[:, 0] - largest).double() * by
        totals = filtered_weights(chunk, by.to(chunk.dtype), None, largest).sum(dim=-1)
        log_probs[part] = (picked - totals.double().log()).float().cpu().numpy()
    return log_probs


def top2_gaps(
    logits: torch.Tensor, rows: npt.NDArray[np.integer], best_ids: npt.NDArray[np.integer]
) -> FloatArray:
    """Return best − second logit of some rows of logits [M, V]; 0 is a tie.

    rows [n]; best_ids [n] their arg-maxima.
    """
    if logits.device.type != "cpu" or logits.shape[1] < _MIN_SCAN_SIZE:
        best = logits[torch.from_numpy(rows).to(logits.device)].topk(min(2, logits.shape[1]))[0]
        return (best[:, 0] - best[:, -1]).float().cpu().numpy()
    table = logits.detach().numpy()
    gaps = [_gap(table[row], best) for row, best in zip(rows, best_ids, strict=True)]
    return np.array(gaps, dtype=np.float32)


def _gap(row: npt.NDArray[np.floating], best: int) -> float:
    others = [part.max() for part in (row[:best], row[best + 1 :]) if part.size]
    return float(row[best] - max(others))
