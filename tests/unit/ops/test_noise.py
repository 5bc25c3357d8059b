# SPDX-License-Identifier: Apache-2.0
"""Noise: published Philox answers, the same bits in numpy, torch and the Triton language."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trtllm_dspark.ops import noise
from trtllm_dspark.ops.noise import Purpose

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(key, counter, expected):
    assert tuple(int(word) for word in noise.philox(np.uint64(key), counter)) == expected


@settings(deadline=None)
@given(key=SEED, counter=st.tuples(WORD, WORD, WORD, WORD))
def test_torch_and_numpy_give_the_same_bits(key, counter):
    signed = key - 2**64 if key >= 2**63 else key
    words = noise.philox_torch(torch.tensor(signed), tuple(torch.tensor(c) for c in counter))
    expected = noise.philox(np.uint64(key), counter)
    assert [int(w) for w in words] == [int(w) for w in expected]


TRITON_PROGRAM = """
import json, sys
import torch, triton, triton.language as tl

@triton.jit
def draw(out, seed, position, slot, purpose, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    zero = lanes * 0
    words = tl.philox(seed, lanes, zero + position, zero + slot, zero + purpose)
    for i in tl.static_range(4):
        tl.store(out + lanes * 4 + i, words[i].to(tl.int64))

seed, position, slot, purpose = json.loads(sys.argv[1])
out = torch.zeros(64, dtype=torch.int64)
draw[(1,)](out, seed, position, slot, purpose, BLOCK=16)
print(json.dumps([w & 0xffffffff for w in out.tolist()]))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="the Triton language is not installed")
def test_the_triton_language_gives_the_same_bits(tmp_path):
    """In a process of its own: the interpreter is chosen by the environment at import."""
    program = tmp_path / "draw.py"
    program.write_text(TRITON_PROGRAM)
    seed, position, slot, purpose = 0x299F31D0A4093822, 70_001, 3, int(Purpose.COUPLED)
    done = subprocess.run(
        [sys.executable, str(program), json.dumps([seed, position, slot, purpose])],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words = noise.philox(np.uint64(seed), (np.arange(16, dtype=np.uint64), position, slot, purpose))
    assert json.loads(done.stdout) == np.stack(words, axis=-1).reshape(-1).tolist()


@settings(deadline=None)
@given(
    seed=SEED,
    position=st.integers(0, 2**31 - 1),
    vocab_size=st.integers(1, 70),
    data=st.data(),
)
def test_the_noise_of_chosen_tokens_is_that_of_the_whole_row(seed, position, vocab_size, data):
    row = noise.gumbel_row(seed, position, 2, Purpose.DRAFT, vocab_size)
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=10))
    assert row.shape == (vocab_size,)
    assert noise.gumbel_at(seed, position, 2, Purpose.DRAFT, ids).tolist() == row[ids].tolist()


def test_uniforms_cover_zero_to_one_and_exclude_one():
    largest = noise.uniform_from_bits(2**32 - 1, 2**32 - 1)
    assert float(noise.uniform_from_bits(0, 0)) == 0.0
    assert float(largest) == 1.0 - 2.0**-53


def test_gumbels_are_finite_for_every_word_and_within_the_stated_bounds():
    lowest, highest = noise.gumbel_from_bits([0, 2**32 - 1])
    assert noise.GUMBEL_MIN < lowest < noise.GUMBEL_MIN + 0.02
    assert noise.GUMBEL_MAX - 0.02 < highest < noise.GUMBEL_MAX


def test_a_float32_gumbel_by_the_documented_form_agrees():
    words = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint64)
    below = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    above = ((2**32 - 1 - words).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        minus_log = np.where(words < 2**31, -np.log(below), -np.log1p(-above))
    np.testing.assert_allclose(-np.log(minus_log), noise.gumbel_from_bits(words), atol=3e-6)


def test_keys_of_different_purposes_slots_positions_and_seeds_share_no_number():
    drawn = [
        float(noise.keyed_uniforms(np.uint64(seed), position, slot, purpose))
        for seed in (0, 1, 2**63)
        for position in (0, 1, 2, 70_000)
        for slot in range(8)
        for purpose in Purpose
    ]
    assert len(set(drawn)) == len(drawn)


def test_a_number_depends_on_its_key_alone_whatever_it_is_drawn_with():
    seeds = np.array([5, 6, 7], dtype=np.uint64)
    together = noise.accept_uniforms(seeds, [10, 20, 30], 4)
    alone = noise.accept_uniforms(seeds[1:2], [20], 2)
    assert together[1, :2].tolist() == alone[0].tolist()
    assert noise.final_uniforms(seeds, [10, 20, 30])[2] == noise.final_uniforms(seeds[2:], [30])[0]


def test_uniforms_and_gumbels_have_their_distributions():
    """Kolmogorov–Smirnov at fixed keys; a fresh key would fail once in 10⁶."""
    seeds = np.arange(20_000, dtype=np.uint64)
    uniforms = noise.keyed_uniforms(seeds, 17, 0, Purpose.FINAL)
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-6
    gumbels = noise.gumbel_row(3, 17, 0, Purpose.COUPLED, 20_000)
    assert stats.kstest(gumbels, "gumbel_r").pvalue > 1e-6
