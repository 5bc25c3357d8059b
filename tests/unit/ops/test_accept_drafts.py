# SPDX-License-Identifier: Apache-2.0
"""The acceptance op on enumerated ragged cases: edges, residuals, ties, truncation, padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trtllm_dspark.ops.accept_drafts import AcceptRule, accept_drafts

P = [0.5, 0.3, 0.2]
Q = [0.2, 0.2, 0.6]


def run(rows, drafts, verify_lens, **overrides):
    """Call the op with one list of probability rows per request; everything else has a default."""
    num_requests, num_slots = np.shape(drafts)
    flat = torch.tensor([row for request in rows for row in request], dtype=torch.float64)
    inputs = {
        "logits": flat.log(),
        "scale": torch.ones(num_requests, dtype=torch.float64),
        "thresholds": None,
        "cu_rows": torch.tensor(np.cumsum([0, *(n + 1 for n in verify_lens)]), dtype=torch.int32),
        "draft_token_ids": torch.tensor(drafts, dtype=torch.int32).reshape(num_requests, num_slots),
        "draft_lens": torch.full((num_requests,), num_slots, dtype=torch.int32),
        "draft_probs": None,
        "sampled": torch.zeros(num_requests, dtype=torch.bool),
        "rules": torch.full((num_requests,), int(AcceptRule.REJECTION), dtype=torch.int32),
        "accept_uniforms": torch.zeros((num_requests, num_slots), dtype=torch.float64),
        "final_uniforms": torch.zeros(num_requests, dtype=torch.float64),
        "seeds": torch.arange(num_requests),
        "anchor_positions": torch.full((num_requests,), 10),
    }
    accepted, next_ids, dropped = accept_drafts(**(inputs | overrides))
    return accepted.tolist(), next_ids.tolist(), dropped.tolist()


def uniforms(*values):
    return torch.tensor(values, dtype=torch.float64)


def q_rows(*rows):
    return {
        "draft_probs": torch.tensor(rows, dtype=torch.float64),
        "sampled": torch.ones(len(rows), dtype=torch.bool),
    }


GREEDY = {"rules": torch.tensor([int(AcceptRule.GREEDY)], dtype=torch.int32)}
COUPLED = {"rules": torch.tensor([int(AcceptRule.COUPLED)], dtype=torch.int32)}


@pytest.mark.parametrize(("draft", "ratio"), [(0, 1.0), (1, 1.0), (2, 0.2 / 0.6)])
def test_a_sampled_draft_is_accepted_below_p_over_q_and_not_above(draft, ratio):
    below, above = ratio * (1 - 1e-12), ratio * (1 + 1e-12)
    for uniform, expected in ((below, 1), (above, 0)):
        if uniform < 1.0:
            found = run(
                [[P, P]], [[draft]], [1], accept_uniforms=uniforms([uniform]), **q_rows([Q])
            )
            assert found[0] == [expected]


def test_a_deterministic_draft_is_accepted_with_the_target_probability():
    assert run([[P, P]], [[1]], [1], accept_uniforms=uniforms([0.3 - 1e-12]))[0] == [1]
    assert run([[P, P]], [[1]], [1], accept_uniforms=uniforms([0.3 + 1e-12]))[0] == [0]


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.74, 0), (0.76, 1), (0.999, 1)])
def test_a_recovered_token_follows_the_residual(uniform, token):
    """max(p − q, 0) = [.3, .1, 0]: three quarters and one quarter."""
    found = run(
        [[P, P]],
        [[2]],
        [1],
        accept_uniforms=uniforms([0.99]),
        final_uniforms=uniforms(uniform),
        **q_rows([Q]),
    )
    assert found[:2] == ([0], [token])


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.71, 0), (0.72, 2)])
def test_a_rejected_deterministic_draft_is_never_the_recovered_token(uniform, token):
    """p without token 1 = [.5, 0, .2]: five sevenths and two sevenths."""
    found = run(
        [[P, P]],
        [[1]],
        [1],
        accept_uniforms=uniforms([0.99]),
        final_uniforms=uniforms(uniform),
    )
    assert found[:2] == ([0], [token])


@pytest.mark.parametrize("verify_len", [0, 1, 2])
@pytest.mark.parametrize(("uniform", "token"), [(0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2)])
def test_the_bonus_follows_the_row_reached_whatever_was_dropped(verify_len, uniform, token):
    impossible = [[0.0, 0.0, 1.0]] * verify_len
    found = run(
        [[*impossible, P]],
        [[2, 2]],
        [verify_len],
        accept_uniforms=uniforms([0.5, 0.5]),
        final_uniforms=uniforms(uniform),
        **q_rows([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
    )
    assert found[:2] == ([verify_len], [token])


def test_a_residual_that_is_numerically_empty_falls_back_to_p():
    found = run(
        [[P, P]],
        [[2]],
        [1],
        accept_uniforms=uniforms([math.nan]),
        final_uniforms=uniforms(0.6),
        **q_rows([P]),
    )
    assert found[:2] == ([0], [1])


def test_a_dropped_draft_gets_its_acceptance_probability_and_nothing_else():
    found = run([[P]], [[2]], [0], accept_uniforms=uniforms([math.nan]), **q_rows([Q]))
    assert found[0] == [0] and found[2] == [pytest.approx(1 / 3)]
    assert run([[P]], [[0]], [0], **q_rows([Q]))[2] == [1.0]
    assert run([[P]], [[1]], [0])[2] == [pytest.approx(0.3)]
    assert run([[P]], [[0]], [0], **GREEDY)[2] == [1.0]
    assert run([[P]], [[1]], [0], **GREEDY)[2] == [0.0]


def test_no_acceptance_probability_after_a_rejection_or_without_a_dropped_draft():
    rejected = run([[P, P]], [[2, 0]], [1], accept_uniforms=uniforms([0.99, 0.0]))
    assert rejected[0] == [0] and math.isnan(rejected[2][0])
    full = run([[P, P]], [[0]], [1])
    assert full[0] == [1] and math.isnan(full[2][0])
    unproposed = run([[P]], [[2, 0]], [0], draft_lens=torch.zeros(1, dtype=torch.int32))
    assert math.isnan(unproposed[2][0])


def test_greedy_accepts_exactly_the_arg_max_chain_and_ties_go_to_the_lowest_id():
    tied = [0.4, 0.2, 0.4]
    assert run([[tied, P, tied]], [[0, 0]], [2], **GREEDY)[:2] == ([2], [0])
    assert run([[tied, P, tied]], [[2, 0]], [2], **GREEDY)[:2] == ([0], [0])
    assert run([[tied, P, tied]], [[0, 1]], [2], **GREEDY)[:2] == ([1], [0])


def test_a_match_behind_a_mismatch_is_not_accepted():
    assert run([[P, P, Q]], [[1, 0]], [2], **GREEDY)[:2] == ([0], [0])


def test_coupled_output_does_not_depend_on_drafts_or_on_how_many_are_verified():
    rows = [np.random.default_rng(0).dirichlet(np.ones(6)).tolist() for _ in range(4)]
    plain = [run([[row]], [[0]], [0], **COUPLED, anchor_positions=torch.tensor([10 + i]))[1][0]
             for i, row in enumerate(rows)]  # fmt: skip
    for verify_len in range(4):
        accepted, token, dropped = run(
            [rows[: verify_len + 1]], [plain[:3]], [verify_len], **COUPLED
        )
        assert (accepted, token) == ([verify_len], [plain[verify_len]])
        assert dropped == [1.0] if verify_len < 3 else math.isnan(dropped[0])
    wrong = [plain[0], (plain[1] + 1) % 6, plain[2]]
    assert run([rows], [wrong], [3], **COUPLED)[:2] == ([1], [plain[1]])


def test_thresholds_and_temperature_shape_the_distribution():
    """Temperature 0.5 squares p; the threshold then drops token 2: [.25, .09] / .34."""
    settings = {
        "scale": torch.tensor([2.0], dtype=torch.float64),
        "thresholds": torch.tensor([math.log(0.25)] * 2, dtype=torch.float64),
    }
    for uniform, expected in ((0.25 / 0.34 - 1e-9, 1), (0.25 / 0.34 + 1e-9, 0)):
        found = run([[P, P]], [[0]], [1], accept_uniforms=uniforms([uniform]), **settings)
        assert found[0] == [expected]
    assert run([[P, P]], [[2]], [1], final_uniforms=uniforms(0.999), **settings)[:2] == ([0], [1])


def test_a_ragged_batch_of_all_rules_equals_its_requests_alone():
    generator = np.random.default_rng(3)
    verify_lens, num_slots, size = [0, 3, 1, 2, 3, 0, 2, 3, 1], 3, 5
    num = len(verify_lens)
    rows = [generator.dirichlet(np.ones(size), n + 1).tolist() for n in verify_lens]
    drafts = generator.integers(0, size, (num, num_slots)).tolist()
    probs = torch.from_numpy(generator.dirichlet(np.ones(size), (num, num_slots)))
    per_request = {
        "draft_probs": probs,
        "sampled": torch.tensor([True, False, True] * 3),
        "rules": torch.tensor([0, 1, 2, 1, 0, 1, 1, 2, 2], dtype=torch.int32),
        "accept_uniforms": torch.from_numpy(generator.random((num, num_slots))) * 0.3,
        "final_uniforms": torch.from_numpy(generator.random(num)),
        "seeds": torch.from_numpy(generator.integers(-(2**63), 2**63 - 1, num)),
        "anchor_positions": torch.from_numpy(generator.integers(0, 999, num)),
    }
    together = run(rows, drafts, verify_lens, **per_request)
    assert max(together[0]) >= 2
    for r in range(num):
        alone = {name: value[r : r + 1] for name, value in per_request.items()}
        found = run(rows[r : r + 1], drafts[r : r + 1], verify_lens[r : r + 1], **alone)
        np.testing.assert_equal([f[0] for f in found], [t[r] for t in together])


def test_rows_of_q_are_read_only_where_drafts_were_sampled():
    """Requests behind the drafted ones (prompts that just ended) have no row in draft_probs."""
    found = run(
        [[P, P], [P]],
        [[2], [0]],
        [1, 0],
        draft_probs=torch.tensor([[Q]], dtype=torch.float64),
        sampled=torch.tensor([True, False]),
        draft_lens=torch.tensor([1, 0], dtype=torch.int32),
    )
    assert found[:2] == ([1, 0], [0, 0])


def test_no_requests_and_no_draft_columns_are_fine():
    empty = torch.zeros((0, 3), dtype=torch.float64)
    assert run([], np.zeros((0, 2)), [], logits=empty) == ([], [], [])
    accepted, next_ids, dropped = run([[P]], np.zeros((1, 0)), [0], final_uniforms=uniforms(0.6))
    assert (accepted, next_ids) == ([0], [1]) and math.isnan(dropped[0])
    accepted, next_ids, _ = run([[P]], np.zeros((1, 0)), [0], **GREEDY)
    assert (accepted, next_ids) == ([0], [0])
