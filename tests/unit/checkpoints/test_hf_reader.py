# SPDX-License-Identifier: Apache-2.0
"""Target tensors arrive fused under the unified names, bit for bit, or are named in the error."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.checkpoints import layouts
from trtllm_dspark.checkpoints import load_model_config, load_target_weights, target_shapes
from trtllm_dspark.errors import CheckpointError
from trtllm_dspark.models.target import TargetModel

LLAMA = dataclasses.replace(layouts.TARGET, architecture="llama", qk_norm=False)
VARIANTS = {
    "qwen3": layouts.TARGET,
    "llama": LLAMA,
    "tied": dataclasses.replace(LLAMA, tie_word_embeddings=True),
    "bias": dataclasses.replace(layouts.TARGET, attention_bias=True),
}


def expected_weights(stored):
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    heads = {parts[0]: (name, parts) for name, parts in fused.items()}
    rest = {part for parts in fused.values() for part in parts[1:]}
    unified = {}
    for name, tensor in stored.items():
        module = name.split(".")[-2]
        short = name.removeprefix("model.")
        if module in heads:
            whole, parts = heads[module]
            rows = [stored[name.replace(module, part)] for part in parts]
            unified[short.replace(module, whole)] = torch.cat(rows)
        elif module not in rest:
            unified[short] = tensor
    return unified


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_fused_in_order_and_keep_their_bits(tmp_path, variant, dtype):
    config = VARIANTS[variant]
    stored = layouts.write_hf_target(tmp_path, config, dtype=dtype)
    assert load_model_config(tmp_path) == config
    found = load_target_weights(tmp_path, config)
    expected = expected_weights(stored)
    assert set(found) == set(expected) == set(target_shapes(config))
    for name, tensor in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_names_and_shapes_are_those_of_the_target_module(variant):
    config = VARIANTS[variant]
    state = TargetModel(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert target_shapes(config) == shapes


def test_shards_are_joined_by_their_index(tmp_path):
    stored = layouts.hf_target_tensors(layouts.TARGET)
    layouts.write_sharded(tmp_path, layouts.hf_target_config(layouts.TARGET), stored, 3)
    found = load_target_weights(tmp_path, layouts.TARGET)
    for name, tensor in expected_weights(stored).items():
        assert torch.equal(found[name], tensor), name


def test_a_missing_shard_is_named(tmp_path):
    stored = layouts.hf_target_tensors(layouts.TARGET)
    layouts.write_sharded(tmp_path, layouts.hf_target_config(layouts.TARGET), stored)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load_target_weights(tmp_path, layouts.TARGET)


def test_a_tied_head_is_dropped_when_equal_and_refused_when_not(tmp_path):
    config = VARIANTS["tied"]
    stored = layouts.hf_target_tensors(config)
    embedding = stored["model.embed_tokens.weight"]
    stored["lm_head.weight"] = embedding.clone()
    layouts.write_checkpoint(tmp_path, layouts.hf_target_config(config), stored)
    assert "lm_head.weight" not in load_target_weights(tmp_path, config)
    stored["lm_head.weight"] = embedding + 1
    layouts.write_checkpoint(tmp_path, layouts.hf_target_config(config), stored)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true but lm_head\.weight"):
        load_target_weights(tmp_path, config)


def test_stored_rotary_frequencies_are_ignored(tmp_path):
    stored = layouts.hf_target_tensors(LLAMA)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    layouts.write_checkpoint(tmp_path, layouts.hf_target_config(LLAMA), stored)
    assert set(load_target_weights(tmp_path, LLAMA)) == set(target_shapes(LLAMA))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.5.mlp.up_proj.weight", None, r"missing: model\.layers\.5\.mlp\.up_proj"),
        ("model.layers.6.mlp.up_proj.weight", torch.ones(1), r"unexpected: model\.layers\.6\.mlp"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32), r"unexpected: .*q_proj\.bias"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            torch.ones(32, 16),
            r"misshaped: .*k_proj\.weight \[32, 16\] \(expected \[16, 16\]\)",
        ),
        ("lm_head.weight", None, r"missing: lm_head\.weight"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, name, tensor, message):
    stored = layouts.hf_target_tensors(layouts.TARGET)
    stored.pop(name, None)
    if tensor is not None:
        stored[name] = tensor
    layouts.write_checkpoint(tmp_path, layouts.hf_target_config(layouts.TARGET), stored)
    with pytest.raises(CheckpointError, match=message):
        load_target_weights(tmp_path, layouts.TARGET)


def test_long_lists_of_problems_are_cut_with_their_count(tmp_path):
    config = dataclasses.replace(layouts.TARGET, num_layers=8)
    layouts.write_hf_target(tmp_path, layouts.TARGET)
    with pytest.raises(CheckpointError, match="and 14 more"):
        load_target_weights(tmp_path, config)


def test_other_weight_formats_are_refused_with_advice(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        load_target_weights(tmp_path, layouts.TARGET)
