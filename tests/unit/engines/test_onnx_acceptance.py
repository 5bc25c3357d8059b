# SPDX-License-Identifier: Apache-2.0
"""The ONNX body of `accept_drafts` in ONNX Runtime equals the torch op, rule by rule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.ops import noise
from trtllm_dspark.ops.accept_drafts import AcceptRule, accept_drafts

onnx = pytest.importorskip("onnx", reason="needs onnx (extra rtx)")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra dev)")
pytest.importorskip("onnxscript", reason="needs onnxscript (extra rtx)")

from tests.unit.engines.test_onnx_selection import open_session  # noqa: E402
from trtllm_dspark.engines.export_round_ops import export_acceptance  # noqa: E402
from trtllm_dspark.engines.onnx_acceptance import AcceptanceForm  # noqa: E402
from trtllm_dspark.engines.onnx_draft_probs import AS_LOGITS, AS_PROBS, ONE_HOT  # noqa: E402
from trtllm_dspark.engines.onnx_functions import OPSET  # noqa: E402
from trtllm_dspark.engines.onnx_noise import gumbel_lines  # noqa: E402

VOCAB, GAMMA = 17, 3
FORMS = {
    "one-hot": AcceptanceForm(GAMMA, ONE_HOT),
    "probs": AcceptanceForm(GAMMA, AS_PROBS),
    "logits": AcceptanceForm(GAMMA, AS_LOGITS),
    "plain": AcceptanceForm(GAMMA, AS_PROBS, has_thresholds=False, has_coupled=False),
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    path = tmp_path_factory.mktemp("acceptance")
    return {
        name: open_session(export_acceptance(path / f"{name}.onnx", form, vocab_size=VOCAB))
        for name, form in FORMS.items()
    }


def soft_max(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def make_case(rng, lens, draft_lens, rules, form: AcceptanceForm) -> dict[str, np.ndarray]:
    """Inputs of the node. Drafts come from a q near p or are the arg-max, logits have ties."""
    count, num_rows = len(lens), sum(lens) + len(lens)
    cu = np.concatenate(([0], np.cumsum(np.asarray(lens) + 1))).astype(np.int32)
    logits = np.round(rng.normal(size=(num_rows, VOCAB)) * 2).astype(np.float32)
    scales = rng.choice([0.5, 1.0, 1.7], count).astype(np.float32)
    rows = np.minimum(cu[:-1, None] + np.arange(GAMMA), num_rows - 1)
    q_logits = logits[rows] + rng.normal(size=(count, GAMMA, VOCAB)).astype(np.float32)
    q_scaled = q_logits * scales[:, None, None]
    edges = np.sort(q_logits, axis=-1)[..., -9]
    if form.draft_form == AS_LOGITS:
        q_scaled = np.where(q_logits < edges[..., None], -np.inf, q_scaled)
    q = soft_max(q_scaled).astype(np.float32)
    flat = q.reshape(-1, VOCAB).astype(np.float64)
    drawn = [rng.choice(VOCAB, p=row / row.sum()) for row in flat]
    greedy = logits[rows].argmax(axis=-1)
    has_mass = np.take_along_axis(q, greedy[..., None], axis=-1)[..., 0] > 0
    is_greedy = has_mass & (rng.random((count, GAMMA)) < 0.7)
    drafts = np.where(is_greedy, greedy, np.reshape(drawn, greedy.shape))
    tops = q_logits.max(axis=-1)
    kept = q_logits >= edges[..., None]
    weights = np.exp((q_logits - tops[..., None]) * scales[:, None, None])
    stats = np.stack((tops, np.where(kept, weights, 0).sum(axis=-1)), axis=-1)
    thresholds = np.sort(logits, axis=-1)[:, -6]
    thresholds[rng.random(num_rows) < 0.3] = -np.inf
    sampled = (rng.random(count) < 0.7) & (form.draft_form != ONE_HOT)
    return {
        "logits": logits,
        "thresholds": thresholds.astype(np.float32),
        "scales": scales,
        "cu_rows": cu,
        "draft_ids": drafts.astype(np.int32),
        "draft_lens": np.asarray(draft_lens, np.int32),
        "draft_probs": {ONE_HOT: np.zeros(1, np.float32), AS_PROBS: q, AS_LOGITS: q_logits}[
            form.draft_form
        ],
        "draft_stats": stats.astype(np.float32),
        "draft_thresholds": edges.astype(np.float32),
        "sampled": sampled,
        "rules": np.asarray(rules, np.int32),
        "accept_uniforms": rng.integers(0, 1 << 53, (count, GAMMA)),
        "final_uniforms": rng.integers(0, 1 << 53, count),
        "seeds": rng.integers(-(1 << 63), 1 << 63, count),
        "anchor_positions": rng.integers(0, 1 << 20, count),
    }


def reference(case, form: AcceptanceForm) -> list[np.ndarray]:
    """The torch op on the same inputs."""
    given = {name: torch.from_numpy(values) for name, values in case.items()}
    probs = None
    if form.draft_form == AS_PROBS:
        probs = given["draft_probs"]
    if form.draft_form == AS_LOGITS:
        top, mass = given["draft_stats"].unbind(-1)
        shifted = (given["draft_probs"] - top[..., None]) * given["scales"][:, None, None]
        is_cut = given["draft_probs"] < given["draft_thresholds"][..., None]
        probs = (shifted.exp() / mass[..., None]).masked_fill(is_cut, 0.0)
    outcome = accept_drafts(
        logits=given["logits"],
        scale=given["scales"],
        thresholds=given["thresholds"] if form.has_thresholds else None,
        cu_rows=given["cu_rows"],
        draft_token_ids=given["draft_ids"],
        draft_lens=given["draft_lens"],
        draft_probs=probs,
        sampled=given["sampled"],
        rules=given["rules"],
        accept_uniforms=given["accept_uniforms"].double() * 2.0**-53,
        final_uniforms=given["final_uniforms"].double() * 2.0**-53,
        seeds=given["seeds"],
        anchor_positions=given["anchor_positions"],
    )
    return [values.numpy() for values in outcome]


def run(session, case, form: AcceptanceForm) -> list[np.ndarray]:
    """The node; what a form never reads is one element long."""
    unread = {
        "thresholds": not form.has_thresholds,
        "draft_stats": form.draft_form != AS_LOGITS,
        "draft_thresholds": form.draft_form != AS_LOGITS,
    }
    short = {name: np.zeros(1, np.float32) for name, is_unread in unread.items() if is_unread}
    names = ["accepted_lens", "next_token_ids", "dropped_accept_probs"]
    found: list[np.ndarray] = session.run(names, {**case, **short})
    assert [values.dtype for values in found] == [np.int32, np.int32, np.float32]
    return found


def compare(found, expected) -> None:
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rule", AcceptRule, ids=lambda rule: rule.name.lower())
def test_each_rule_equals_the_op_for_every_pair_of_verified_and_proposed_lengths(
    sessions, name, rule
):
    form, rng = FORMS[name], np.random.default_rng(int(rule))
    if rule == AcceptRule.COUPLED and not form.has_coupled:
        pytest.skip("this form leaves the coupled rule out")
    accepted = set()
    lens = [(v, p) for v, p in itertools.product(range(GAMMA + 1), repeat=2) if v <= p]
    for first, second in itertools.product(lens, repeat=2):
        case = make_case(rng, (first[0], second[0]), (first[1], second[1]), [rule] * 2, form)
        expected = reference(case, form)
        compare(run(sessions[name], case, form), expected)
        accepted.update(expected[0].tolist())
    assert accepted == set(range(GAMMA + 1)), "the cases must reach every accepted length"


@pytest.mark.parametrize("name", ["one-hot", "probs", "logits"])
def test_requests_under_different_rules_share_a_batch(sessions, name):
    form, rng = FORMS[name], np.random.default_rng(9)
    for _ in range(60):
        count = int(rng.integers(1, 7))
        proposed = rng.integers(0, GAMMA + 1, count)
        lens = [int(rng.integers(0, p + 1)) for p in proposed]
        case = make_case(rng, lens, proposed, rng.integers(0, 3, count), form)
        compare(run(sessions[name], case, form), reference(case, form))


def test_the_largest_and_the_smallest_uniforms_draw_tokens_that_have_weight(sessions):
    form, rng = FORMS["probs"], np.random.default_rng(3)
    for edge in (0, (1 << 53) - 1):
        case = make_case(rng, (0, 2, 3), (0, 3, 3), [AcceptRule.REJECTION] * 3, form)
        case["final_uniforms"][:] = edge
        case["accept_uniforms"][:] = edge
        expected = reference(case, form)
        compare(run(sessions["probs"], case, form), expected)
        rows = case["cu_rows"][:-1] + expected[0]
        assert (case["logits"][rows, expected[1]] >= case["thresholds"][rows]).all()


def test_an_empty_residual_draws_from_p(sessions):
    """q above p everywhere (more than its sum allows): a rejection leaves nothing of p − q."""
    form, rng = FORMS["plain"], np.random.default_rng(4)
    case = make_case(rng, (1,), (1,), [AcceptRule.REJECTION], form)
    p = soft_max(case["logits"][:1] * case["scales"][0])
    case["draft_probs"][:] = (p * 1.001).astype(np.float32)
    case["sampled"][:], case["accept_uniforms"][:] = True, (1 << 53) - 1
    expected = reference(case, form)
    assert expected[0].tolist() == [0]
    compare(run(sessions["plain"], case, form), expected)


def test_an_absent_request_gets_nothing_and_changes_nothing(sessions):
    form, rng = FORMS["probs"], np.random.default_rng(5)
    for gone in range(3):
        case = make_case(rng, (2, 1, 3), (3, 3, 3), [1, 0, 2], form)
        kept = [i for i in range(3) if i != gone]
        start, end = case["cu_rows"][gone : gone + 2]
        case["logits"] = np.delete(case["logits"], np.s_[start:end], axis=0)
        case["thresholds"] = np.delete(case["thresholds"], np.s_[start:end])
        case["cu_rows"][gone + 1 :] -= end - start
        per_row = ("logits", "thresholds", "cu_rows")
        alone = {n: x if n in per_row else x[kept] for n, x in case.items()}
        alone["cu_rows"] = np.delete(case["cu_rows"], gone)
        found = run(sessions["probs"], case, form)
        compare([x[kept] for x in found], reference(alone, form))
        assert (found[0][gone], found[1][gone]) == (0, -1) and np.isnan(found[2][gone])


def test_noise_in_the_body_has_the_bits_of_the_numpy_generator(tmp_path):
    lines = (
        "zero = Constant <value_int = 0> ()\none = Constant <value_int = 1> ()\n"
        "first = Constant <value_ints = [0]> ()\nsecond = Constant <value_ints = [1]> ()\n"
        + gumbel_lines("seeds", "positions", "vocab")
    )
    text = f"""<ir_version: 9, opset_import: ["" : {OPSET}]>
    g (int64[N] seeds, int64[N] positions, int64 vocab) => (double[N, V] gumbels) {{ {lines} }}"""
    onnx.save(onnx.parser.parse_model(text), str(tmp_path / "noise.onnx"))
    session = open_session(tmp_path / "noise.onnx")
    seeds = np.array([0, 1, 1 << 32, (1 << 63) + 12345, (1 << 64) - 1], np.uint64)
    positions = np.array([0, 5, (1 << 32) - 1, 77, 1 << 20])
    for vocab in (1, 4, 18):
        feed = {
            "seeds": seeds.view(np.int64),
            "positions": positions,
            "vocab": np.array(vocab),
        }
        (found,) = session.run(None, feed)
        rows = [
            noise.gumbel_row(int(s), int(p), 0, noise.Purpose.COUPLED, vocab)
            for s, p in zip(seeds, positions, strict=True)
        ]
        np.testing.assert_allclose(found, np.stack(rows), rtol=1e-13, atol=1e-15)


def test_the_node_is_the_plugins_and_the_body_can_be_left_out(tmp_path):
    pytest.importorskip("triton", reason="the table of ops names Triton-language kernels")
    from dspark_plugins.tensorrt_ops import OPS

    path = export_acceptance(
        tmp_path / "a.onnx", FORMS["logits"], vocab_size=VOCAB, with_functions=False
    )
    model = onnx.load(str(path))
    spec = next(spec for spec in OPS if spec.name == "accept_drafts")
    (node,) = model.graph.node
    assert not model.functions and tuple(node.input) == spec.inputs and len(node.output) == 3
    assert {a.name for a in node.attribute} == set(spec.attributes)


def test_a_form_without_drafts_or_of_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="num_drafts"):
        AcceptanceForm(0)
    with pytest.raises(ConfigError, match="draft_form"):
        AcceptanceForm(3, 7)
