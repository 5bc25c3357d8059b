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

from trtllm_dspark.types import FloatArray

_MIN_SCAN_SIZE = 4096
"""Vocabulary from which two scans of a CPU row beat torch's top-k."""


def token_log_probs(
    logits: torch.Tensor, scale: npt.NDArray[np.float64], token_ids: npt.NDArray[np.integer]
) -> FloatArray:
    """Return ln softmax(logits · scale)[token] for each row: logits [n, V], scale [n], token_ids
    [n]."""
    scaled = logits * torch.as_tensor(scale, dtype=logits.dtype, device=logits.device)[:, None]
    index = torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(logits.device)
    picked = scaled.gather(1, index[:, None])[:, 0]
    return (picked - scaled.logsumexp(dim=-1)).float().cpu().numpy()


def top2_gaps(logits: torch.Tensor, rows: npt.NDArray[np.integer]) -> FloatArray:
    """Return the difference between the best and the second logit of some rows; 0 is a tie."""
    if logits.device.type != "cpu" or logits.shape[1] < _MIN_SCAN_SIZE:
        best = logits[torch.from_numpy(rows).to(logits.device)].topk(min(2, logits.shape[1]))[0]
        return (best[:, 0] - best[:, -1]).float().cpu().numpy()
    table = logits.detach().numpy()
    return np.array([_gap(table[row]) for row in rows], dtype=np.float32)


def _gap(row: npt.NDArray[np.floating]) -> float:
    best = int(row.argmax())
    others = [part.max() for part in (row[:best], row[best + 1 :]) if part.size]
    return float(row[best] - max(others)) if others else 0.0
