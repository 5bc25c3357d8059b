# SPDX-License-Identifier: Apache-2.0
"""Copying target layers: the copy computes what the target layer computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.training.toy import CONFIG, make_drafter, make_target
from trtllm_dspark.checkpoints import load_drafter, write_drafter
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.training.warm_start import (
    copy_layers_,
    initialize_,
    load_drafter_,
    principal_directions,
)


def noisy_target() -> torch.nn.Module:
    target = make_target()
    generator = torch.Generator().manual_seed(9)
    for parameter in target.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1
    return target


def test_copied_projections_give_the_target_layers_keys_and_values() -> None:
    """With fc passing the tap on, context K/V are those of the target layer above the tap."""
    target = noisy_target()
    model = make_drafter(target, rms_norm_eps=CONFIG.rms_norm_eps, qk_norm=False)
    initialize_(model, target, torch.Generator().manual_seed(0))
    copy_layers_(model, target, (1,))
    taps, _ = DenseTarget(target, model.config.target_layer_ids).run(np.arange(6), np.array([0, 6]))
    layer = target.layers[1]
    qkv = layer.self_attn.qkv_proj(layer.input_layernorm(taps[:, -64:]))
    _, v = next(iter(model.project_context(taps, torch.arange(6))))
    torch.testing.assert_close(v.reshape(6, -1), qkv[:, -16:], atol=1e-5, rtol=1e-4)


def test_the_heads_are_silent_at_first() -> None:
    target = make_target()
    model = make_drafter(target)
    initialize_(model, target, torch.Generator().manual_seed(0))
    assert not model.markov.w2.weight.any()
    assert not model.confidence.proj.weight.any()
    assert torch.equal(model.norm.weight, target.norm.weight)


def test_principal_directions_keep_distances_that_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    plane = torch.randn(40, 2, generator=generator) @ torch.randn(2, 10, generator=generator)
    found = principal_directions(plane, 3)
    assert found.shape == (40, 3)
    torch.testing.assert_close(found[:, :2].std(0), torch.ones(2))
    assert principal_directions(plane, 12)[:, 10:].abs().sum() == 0


@pytest.mark.parametrize(
    ("layers", "message"), [((0, 1), "cannot be copied"), ((2,), "not all in")]
)
def test_layers_that_do_not_exist_or_do_not_fit_are_refused(layers: tuple, message: str) -> None:
    target = make_target()
    with pytest.raises(ConfigError, match=message):
        copy_layers_(make_drafter(target, qk_norm=False), target, layers)


def test_a_run_can_start_from_an_exported_drafter(tmp_path: Path) -> None:
    target = make_target()
    trained = make_drafter(target)
    initialize_(trained, target, torch.Generator().manual_seed(5))
    write_drafter(tmp_path / "drafter", trained.config, trained.state_dict())
    model = make_drafter(target)
    load_drafter_(model, *load_drafter(tmp_path / "drafter", target.config))
    expected = trained.state_dict()
    assert expected.keys() == model.state_dict().keys()
    for name, found in model.state_dict().items():
        assert torch.equal(found, expected[name]), name


def test_a_drafter_of_another_shape_is_no_start() -> None:
    target = make_target()
    other = make_drafter(target, num_drafts=2)
    with pytest.raises(ConfigError, match=r"num_drafts 2 \(wanted \d\)"):
        load_drafter_(make_drafter(target), other.config, other.state_dict())
