# SPDX-License-Identifier: Apache-2.0
"""Answers that are already evaluated, one JSON line each, so that a run can be interrupted.

A line names its case (a digest of all that its blocks depend on) and its prompt; lines of other
cases are left alone, and a half-written last line is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.evaluation.block_collection import PromptBlocks
from trtllm_dspark.types import IntArray


def case_key(facts: Mapping[str, Any]) -> str:
    """Digest of the facts that decide what a case's blocks are."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class BlockStore:
    """A JSONL file, or nothing at all (path None)."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None and path.is_file():
            text = path.read_text("utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                path.write_text(whole, encoding="utf-8")

    def load(self, case: str, prompts: Mapping[str, IntArray]) -> dict[str, PromptBlocks]:
        """Stored answers of the case to exactly these prompts."""
        found: dict[str, PromptBlocks] = {}
        if self.path is None or not self.path.is_file():
            return found
        for line in self.path.read_text("utf-8").splitlines():
            row = json.loads(line)
            prompt = prompts.get(row["prompt_id"])
            if row["case"] == case and prompt is not None and row["prompt"] == digest(prompt):
                found[row["prompt_id"]] = from_json_row(row)
        return found

    def append(self, case: str, prompt: IntArray, blocks: PromptBlocks) -> None:
        """Add one finished answer."""
        if self.path is None:
            return
        row = {"case": case, "prompt": digest(prompt), **to_json_row(blocks)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def digest(prompt: IntArray) -> str:
    """Digest of a prompt's tokens."""
    tokens = np.ascontiguousarray(prompt, np.int32).tobytes()
    return hashlib.blake2b(tokens, digest_size=8).hexdigest()


def to_json_row(blocks: PromptBlocks) -> dict[str, Any]:
    """Exact JSON form; −inf (nothing proposed) becomes null."""
    logits = [[None if np.isneginf(x) else float(x) for x in row] for row in blocks.logits]
    return {
        "prompt_id": blocks.prompt_id,
        "num_drafts": blocks.logits.shape[1],
        "logits": logits,
        "judged_lens": blocks.judged_lens.tolist(),
        "accepted_lens": blocks.accepted_lens.tolist(),
        "num_tokens": blocks.num_tokens,
        "num_steps": blocks.num_steps,
    }


def from_json_row(row: Mapping[str, Any]) -> PromptBlocks:
    """Read what `to_json_row` made."""
    logits = [[-np.inf if x is None else x for x in line] for line in row["logits"]]
    return PromptBlocks(
        row["prompt_id"],
        np.asarray(logits, np.float32).reshape(-1, row["num_drafts"]),
        np.asarray(row["judged_lens"], np.int32),
        np.asarray(row["accepted_lens"], np.int32),
        row["num_tokens"],
        row["num_steps"],
    )
