# SPDX-License-Identifier: Apache-2.0
"""The confidence head fitted alone: on what, that it learns, and that nothing else moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.training.toy import make_drafter, make_target, permutation, write_answers
from trtllm_dspark.checkpoints import load_drafter
from trtllm_dspark.checkpoints.drafter_writer import write_drafter
from trtllm_dspark.errors import CheckpointError, ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.training import fit_confidence
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.confidence_fit import (
    ConfidenceEvents,
    FitConfig,
    collect_events,
    fit_head,
)
from trtllm_dspark.training.fit_confidence import choose_sequences, with_new_head
from trtllm_dspark.training.packing import TokenSequence, pack_blocks
from trtllm_dspark.training.token_store import TokenStore
from trtllm_dspark.training.warm_start import initialize_, load_drafter_

ALL = FitConfig(anchor_share=1.0)


def random_drafter(**changes: object) -> tuple[DSparkModel, TargetModel]:
    target = make_target()
    model = make_drafter(target, **changes)
    initialize_(model, target, torch.Generator().manual_seed(0))
    model.requires_grad_(False)
    if model.markov is not None:
        # Knows what follows half of the tokens, and hardly looks at the context.
        model.norm.weight.mul_(0.01)
        w1 = torch.nn.functional.normalize(torch.randn(model.markov.w1.weight.shape))
        model.markov.w1.weight.copy_(w1)
        model.markov.w2.weight[permutation()] = 8.0 * w1
        model.markov.w2.weight[permutation()[::2].copy()] = 0.0
    return model, target


@pytest.mark.parametrize("head", ["markov", "none"])
def test_events_are_the_reached_slots_of_greedy_drafts(tmp_path: Path, head: str) -> None:
    torch.manual_seed(1)
    changes = {"head_type": head}
    if head == "none":
        changes |= {"markov_rank": 0, "confidence_with_markov": False}
    model, target = random_drafter(**changes, confidence_with_peak=True)
    model.confidence.proj.weight.copy_(torch.randn(model.confidence.proj.weight.shape))
    store = write_answers(tmp_path, 6, seed=2)
    sequences = choose_sequences([store], 64, 6, seed=0)
    dense = DenseTarget(target, model.config.target_layer_ids)
    events = collect_events(model, dense, sequences, ALL)
    logits = events.features @ model.confidence.proj.weight[0] + model.confidence.proj.bias
    found = iter(zip(events.slots, events.matches, logits, strict=True))
    for sequence in sequences:
        drafts = draft_everywhere(model, dense, sequence)
        for slot in range(3):
            for row in drafts:
                if len(row) > slot and all(is_right for _, is_right in row[:slot]):
                    logit, is_right = row[slot]
                    at, match, own = next(found)
                    assert (at, bool(match)) == (slot, is_right)
                    assert float(own) == pytest.approx(logit, rel=1e-4, abs=1e-4)
    assert next(found, None) is None
    assert head == "none" or events.slots.max() == 2
    assert 0.0 <= events.survivals.min() <= events.survivals.max() <= 1.0


def draft_everywhere(
    model: DSparkModel, dense: DenseTarget, sequence: TokenSequence
) -> list[list[tuple[float, bool]]]:
    """Per anchor: (confidence logit, whether the draft is right) of each slot with a next token."""
    anchors = np.arange(sequence.prompt_len, len(sequence.token_ids) - 1)
    packed = pack_blocks([sequence], [anchors], model.config.num_drafts)
    taps, _ = dense.run(packed.token_ids, packed.cu_seq_lens)
    drafted = model.draft_from_hidden(
        torch.from_numpy(packed.token_ids[packed.anchor_rows]), forward_blocks(model, taps, packed)
    )
    labels = [sequence.token_ids[a + 1 : a + 1 + model.config.num_drafts] for a in anchors]
    return [
        [(z, x == y) for z, x, y in zip(logits, ids, wanted.tolist(), strict=False)]
        for logits, ids, wanted in zip(
            drafted.confidence_logits.tolist(), drafted.token_ids.tolist(), labels, strict=True
        )
    ]


def make_events(num: int = 4000) -> tuple[ConfidenceEvents, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num, 4, generator=generator) * torch.tensor([1.0, 10.0, 0.1, 1.0])
    logits = features @ torch.tensor([1.0, 0.2, 0.0, -1.0]) + 0.5
    matches = torch.rand(num, generator=generator) < torch.sigmoid(logits)
    slots = np.arange(num) % 3
    survivals = torch.sigmoid(-logits).numpy()
    return ConfidenceEvents(features, slots, matches.numpy(), survivals), logits


def test_a_fit_finds_the_line_that_made_the_events() -> None:
    events, logits = make_events()
    weight, bias = fit_head(events, FitConfig(ridge=1e-5, sampled_share=0.0))
    found = (events.features @ weight.T).squeeze(1) + bias
    assert float((found - logits).abs().mean()) < 0.15
    assert torch.equal(weight, fit_head(events, FitConfig(ridge=1e-5, sampled_share=0.0))[0])


def test_the_shares_choose_between_greedy_and_sampled_acceptance() -> None:
    events, logits = make_events()
    weight, bias = fit_head(events, FitConfig(ridge=1e-5, sampled_share=1.0))
    found = (events.features @ weight.T).squeeze(1) + bias
    assert float((found + logits).abs().mean()) < 0.01


def test_the_command_changes_the_head_alone(tmp_path: Path, monkeypatch) -> None:
    torch.manual_seed(1)
    model, target = random_drafter()
    monkeypatch.setattr(fit_confidence, "load_plain_target", lambda *_: target)
    monkeypatch.setattr(fit_confidence, "hash_checkpoint", lambda _: "toy")
    write_answers(tmp_path / "data", 40, seed=2)
    write_answers(tmp_path / "validation", 10, seed=3)
    given = write_drafter(
        tmp_path / "given", model.config, model.state_dict(), extra={"made by": "hand"}
    )
    options = {
        "--model-dir": tmp_path,
        "--drafter": given,
        "--data": tmp_path / "data",
        "--validation": tmp_path / "validation",
        "--output": tmp_path / "fitted",
        "--dtype": "float32",
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    assert fit_confidence.main(arguments) == 0
    config, weights = load_drafter(tmp_path / "fitted", target.config)
    assert config.confidence_with_peak
    assert weights["confidence.proj.weight"].shape == (1, 64 + 8 + 1)
    for name, old in model.state_dict().items():
        if not name.startswith("confidence."):
            assert torch.equal(weights[name], old.to(torch.bfloat16)), name
    extra = fit_confidence.load_json(tmp_path / "fitted" / "config.json")["extra"]
    assert extra["made by"] == "hand"
    fit = extra["confidence_fit"]
    assert fit["after"]["acceptance_length"] == fit["before"]["acceptance_length"]
    assert fit["after"]["roc_auc"][0] > 0.9

    monkeypatch.setattr(fit_confidence, "collect_events", None)  # asked before the long work
    with pytest.raises(CheckpointError, match="pass overwrite"):
        fit_confidence.main(arguments)

    again, _ = random_drafter()
    load_drafter_(again, config, weights)  # training goes on without the peak
    assert again.confidence.proj.weight.shape == (1, 64 + 8)


def test_data_without_answers_is_refused(tmp_path: Path) -> None:
    store = write_answers(tmp_path, 0, seed=0)
    with pytest.raises(ConfigError, match="no answer"):
        choose_sequences([store, TokenStore(tmp_path)], 64, 5, seed=0)


def test_a_new_head_keeps_the_drafts() -> None:
    model, target = random_drafter(
        confidence_head=False, confidence_with_markov=False, confidence_bias=False
    )
    fitted = with_new_head(model, target, with_peak=True)
    config = fitted.config
    assert (config.confidence_with_markov, config.confidence_bias) == (True, True)
    anchors, hidden = torch.tensor([3, 9]), torch.randn(2, 3, 64)
    assert torch.equal(
        model.draft_from_hidden(anchors, hidden).token_ids,
        fitted.draft_from_hidden(anchors, hidden).token_ids,
    )
