# SPDX-License-Identifier: Apache-2.0
"""The torch engine refuses steps that cannot run, and chooses a dtype by measuring."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from tests.unit.decoding.loops import VOCAB, TinyModel
from tests.unit.models.builders import paged_engine
from trtllm_dspark.engines.fingerprint import fingerprint, hash_checkpoint
from trtllm_dspark.engines.precision import resolve_dtype
from trtllm_dspark.engines.protocol import TargetStep
from trtllm_dspark.errors import EngineError


@pytest.fixture(scope="module")
def engine():
    return paged_engine(TinyModel().target, rungs=(4, 8))


GOOD = TargetStep(
    token_ids=np.array([1, 2, 3], np.int32),
    positions=np.array([0, 1, 2], np.int32),
    cu_query_lens=np.array([0, 3], np.int32),
    context_lens=np.array([0], np.int32),
    page_table=np.array([[1]], np.int32),
    logit_rows=np.array([2], np.int32),
    rung=4,
)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"rung": 5}, "rung 5 is not on the ladder"),
        ({"cu_query_lens": np.array([0, 2], np.int32)}, "prefix sums"),
        ({"token_ids": np.array([1, 2, VOCAB], np.int32)}, f"outside the vocabulary of {VOCAB}"),
        ({"token_ids": np.array([1, -2, 3], np.int32)}, "token ids from -2"),
        ({"page_table": np.array([[40]], np.int32)}, "outside the page pool of 40"),
        ({"page_table": np.array([[-1]], np.int32)}, "page ids from -1"),
    ],
)
def test_a_step_that_cannot_run_is_refused_with_the_value_found(engine, change, message):
    with pytest.raises(EngineError, match=message):
        engine.run_target(dataclasses.replace(GOOD, **change))


def test_no_logit_rows_and_no_requests_are_steps_too(engine):
    none = np.zeros(0, np.int32)
    output = engine.run_target(dataclasses.replace(GOOD, logit_rows=none))
    assert output.logits.shape == (0, VOCAB) and output.taps is None
    empty = TargetStep(none, none, np.zeros(1, np.int32), none, np.zeros((0, 0), np.int32), none, 4)
    assert engine.run_target(empty).logits.shape == (0, VOCAB)


def test_dtype_auto_measures_and_logs_both_candidates(caplog):
    with caplog.at_level(logging.INFO):
        assert resolve_dtype("auto", "cpu") in (torch.float32, torch.bfloat16)
    assert "float32" in caplog.text and "bfloat16" in caplog.text and " ms " in caplog.text


def test_named_dtypes_are_taken_as_they_are():
    assert resolve_dtype("bfloat16", "cpu") is torch.bfloat16
    assert resolve_dtype("float32", "cpu") is torch.float32


def test_a_fingerprint_changes_with_any_fact_and_with_nothing_else():
    facts = {"dtype": "float32", "rungs": (1, 2)}
    assert fingerprint(facts, "cpu") == fingerprint(dict(facts), "cpu")
    assert fingerprint(facts, "cpu") != fingerprint({**facts, "rungs": (1, 4)}, "cpu")


def test_a_checkpoint_hash_changes_with_weights_and_configuration(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    first = hash_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a" * 99 + b"b")
    second = hash_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert len({first, second, hash_checkpoint(tmp_path)}) == 3
