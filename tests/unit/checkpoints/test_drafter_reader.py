# SPDX-License-Identifier: Apache-2.0
"""Drafter tensors of every layout arrive under the unified names, bit for bit, or are named."""

from __future__ import annotations

import json

import pytest
import torch

from tests.unit.checkpoints import layouts
from trtllm_dspark.checkpoints import drafter_shapes, load_drafter, write_drafter
from trtllm_dspark.errors import CheckpointError
from trtllm_dspark.models.drafter import DSparkModel

RENAMED = {
    "markov.w1.weight": "markov_head.markov_w1.weight",
    "markov.w2.weight": "markov_head.markov_w2.weight",
    "markov.gate_proj.weight": "markov_head.gate_proj.weight",
    "markov.gate_proj.bias": "markov_head.gate_proj.bias",
    "markov.joint_proj.weight": "markov_head.joint_proj.weight",
    "markov.joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence.proj.weight": "confidence_head.proj.weight",
    "confidence.proj.bias": "confidence_head.proj.bias",
}


def expected_weights(stored):
    """The unified tensors, fused by hand from the published ones."""
    unified = {name: stored[old] for name, old in RENAMED.items() if old in stored}
    for name, tensor in stored.items():
        if ".mlp.gate_proj." in name:
            up = stored[name.replace("gate_proj", "up_proj")]
            unified[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif ".mlp.up_proj." not in name and name not in RENAMED.values():
            unified[name] = tensor
    return unified


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def heads(head_type, **changes):
    rank = 0 if head_type == "none" else 4
    with_markov = head_type != "none"
    return layouts.drafter_config(
        head_type=head_type, markov_rank=rank, confidence_with_markov=with_markov, **changes
    )


@pytest.mark.parametrize("head_type", ["none", "markov", "gated", "rnn"])
@pytest.mark.parametrize("bias", [False, True])
def test_deepspec_tensors_arrive_whatever_the_heads(tmp_path, head_type, bias):
    config = heads(head_type, attention_bias=bias, confidence_bias=bias)
    stored = layouts.write_deepspec(tmp_path, config)
    found, weights = load_drafter(tmp_path, layouts.TARGET)
    assert found == config
    assert_same(weights, expected_weights(stored))


def test_zlab_speculators_and_specforge_tensors_arrive(tmp_path):
    cases = (
        ("zlab", layouts.write_zlab, layouts.plain_dflash_config(), None),
        ("dspark", layouts.write_speculators, layouts.drafter_config(), None),
        ("specforge", layouts.write_specforge, layouts.drafter_config(), True),
    )
    for name, write, config, shift in cases:
        stored = write(tmp_path / name, config)
        found, weights = load_drafter(tmp_path / name, layouts.TARGET, label_shift=shift)
        assert found == config
        assert_same(weights, expected_weights(stored))


def test_sharded_and_bfloat16_checkpoints_keep_their_values(tmp_path):
    config = layouts.drafter_config()
    stored = layouts.random_drafter_tensors(config, dtype=torch.bfloat16)
    layouts.write_sharded(tmp_path, layouts.deepspec_config(config), stored, num_shards=3)
    _, weights = load_drafter(tmp_path, layouts.TARGET)
    assert_same(weights, expected_weights(stored))


def test_a_fused_qkv_projection_is_split(tmp_path):
    config = layouts.plain_dflash_config(attention_bias=True)
    stored = layouts.random_drafter_tensors(config)
    fused = dict(stored)
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            parts = [
                fused.pop(f"layers.{layer}.self_attn.{part}_proj.{kind}")
                for part in ("q", "k", "v")
            ]
            fused[f"layers.{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
    layouts.write_checkpoint(tmp_path, layouts.zlab_config(config), fused)
    _, weights = load_drafter(tmp_path, layouts.TARGET)
    assert_same(weights, expected_weights(stored))


def test_a_fused_projection_of_the_wrong_height_is_named(tmp_path):
    config = layouts.plain_dflash_config()
    stored = layouts.random_drafter_tensors(config)
    stored["layers.0.self_attn.qkv_proj.weight"] = torch.zeros(65, 16)
    layouts.write_checkpoint(tmp_path, layouts.zlab_config(config), stored)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has 65 rows, expected 64"):
        load_drafter(tmp_path, layouts.TARGET)


@pytest.mark.parametrize("head_type", ["none", "markov", "gated", "rnn"])
def test_shapes_are_those_of_the_drafter_module(head_type):
    config = heads(head_type, attention_bias=True)
    embedding = torch.nn.Embedding(61, 16)
    module = DSparkModel(config, embedding, torch.nn.Linear(16, 61, bias=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert drafter_shapes(config) == shapes


def test_book_keeping_tensors_and_identity_vocabulary_maps_are_ignored(tmp_path):
    config = layouts.drafter_config()
    stored = layouts.random_drafter_tensors(config)
    extra = {
        "verifier_norm.weight": torch.ones(16),
        "verifier_lm_head.weight": torch.ones(61, 16),
        "d2t": torch.zeros(61, dtype=torch.int64),
        "t2d": torch.ones(61, dtype=torch.bool),
    }
    layouts.write_checkpoint(tmp_path, layouts.speculators_config(config), {**stored, **extra})
    _, weights = load_drafter(tmp_path, layouts.TARGET)
    assert_same(weights, expected_weights(stored))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.arange(32), "reduced draft vocabulary"),
        ("d2t", torch.zeros(32, dtype=torch.int64), "reduced draft vocabulary"),
        ("d2t", torch.ones(61, dtype=torch.int64), "reduced draft vocabulary"),
        ("mask_embedding", torch.zeros(16), "mask embedding"),
        ("mask_embedding.weight", torch.zeros(1, 16), "mask embedding"),
        ("layers.0.mlp.down_proj.weight_scale", torch.ones(1), "quantised"),
        ("layers.2.input_layernorm.weight", torch.ones(16), r"unexpected: layers\.2\.input"),
        ("fc.weight", torch.zeros(16, 48), r"misshaped: fc\.weight \[16, 48\] \(expected \[16, 32"),
        ("embed_tokens.weight", torch.zeros(60, 16), r"misshaped: embed_tokens\.weight \[60, 16\]"),
        ("fc.weight", None, r"missing: fc\.weight"),
        ("confidence_head.proj.weight", torch.zeros(1, 16), r"misshaped: confidence_head"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, name, tensor, message):
    config = layouts.drafter_config()
    stored = layouts.random_drafter_tensors(config)
    stored.pop(name, None)
    if tensor is not None:
        stored[name] = tensor
    layouts.write_checkpoint(tmp_path, layouts.deepspec_config(config), stored)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, layouts.TARGET)


def test_all_problems_are_named_at_once(tmp_path):
    config = layouts.drafter_config()
    stored = layouts.random_drafter_tensors(config)
    del stored["norm.weight"]
    stored["extra.weight"] = torch.zeros(1)
    stored["hidden_norm.weight"] = torch.zeros(17)
    layouts.write_checkpoint(tmp_path, layouts.deepspec_config(config), stored)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path, layouts.TARGET)
    for part in (
        "missing: norm.weight",
        "unexpected: extra.weight",
        "misshaped: hidden_norm.weight",
    ):
        assert part in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_config_or_tensors_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_drafter(tmp_path, layouts.TARGET)
    config = layouts.deepspec_config(layouts.drafter_config())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_drafter(tmp_path, layouts.TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_drafter(tmp_path, layouts.TARGET)


def test_unified_drafters_state_their_labels_and_version(tmp_path):
    layouts.write_deepspec(tmp_path / "published")
    config, weights = load_drafter(tmp_path / "published", layouts.TARGET)
    write_drafter(tmp_path / "unified", config, weights)
    path = tmp_path / "unified" / "config.json"
    good = json.loads(path.read_text())
    changes = (
        ({"version": 2}, "version 2 is not known"),
        ({"format": "other"}, "format 'other'"),
        (
            {"drafter": {k: v for k, v in good["drafter"].items() if k != "label_shift"}},
            "label_shift",
        ),
        ({"drafter": {**good["drafter"], "surprise": 1}}, r"unknown keys \['surprise'\]"),
        ({"drafter": {**good["drafter"], "num_target_layers": 7}}, "made for another target"),
    )
    for change, message in changes:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path / "unified", layouts.TARGET)
    path.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match="contradicts the converted drafter"):
        load_drafter(tmp_path / "unified", layouts.TARGET, label_shift=False)
