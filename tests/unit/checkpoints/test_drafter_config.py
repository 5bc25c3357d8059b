# SPDX-License-Identifier: Apache-2.0
"""Published drafter configs resolve to one explicit DrafterConfig, or are refused by name."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from tests.unit.checkpoints import layouts
from trtllm_dspark.checkpoints.drafter_config import (
    default_target_layer_ids,
    resolve_drafter_config,
)
from trtllm_dspark.config import ModelConfig, RopeScaling
from trtllm_dspark.errors import CheckpointError, ConfigError

BIAS = ("confidence_head.proj.bias",)


def resolve(data, **kwargs):
    return resolve_drafter_config(data, layouts.TARGET, tensor_names=BIAS, **kwargs)


@pytest.mark.parametrize("head_type", ["none", "markov", "gated", "rnn"])
@pytest.mark.parametrize("confidence", ["off", "plain", "markov"])
def test_deepspec_configs_give_back_what_they_were_made_of(head_type, confidence):
    if head_type == "none" and confidence == "markov":
        pytest.skip("Markov features need a Markov head")
    config = layouts.drafter_config(
        head_type=head_type,
        markov_rank=0 if head_type == "none" else 4,
        confidence_head=confidence != "off",
        confidence_with_markov=confidence == "markov",
        confidence_bias=confidence != "off",
    )
    assert resolve(layouts.deepspec_config(config)) == config


def test_zlab_speculators_and_specforge_configs_give_back_what_they_were_made_of():
    plain, heads = layouts.plain_dflash_config(), layouts.drafter_config()
    assert resolve(layouts.zlab_config(plain)) == plain
    assert resolve(layouts.speculators_config(plain, "dflash")) == plain
    assert resolve(layouts.speculators_config(heads, "dspark")) == heads
    assert resolve(layouts.specforge_config(heads), label_shift=True) == heads


def test_unshifted_blocks_draft_one_token_less_than_their_size():
    data = layouts.zlab_config(layouts.plain_dflash_config(num_drafts=15))
    assert data["block_size"] == 16
    assert resolve(data).num_drafts == 15
    assert resolve(data, label_shift=True).num_drafts == 16


def test_newer_zlab_configs_keep_the_block_size_inside_dflash_config():
    config = layouts.plain_dflash_config()
    data = layouts.zlab_config(config)
    data["dflash_config"]["block_size"] = data.pop("block_size")
    assert resolve(data) == config


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (28, 1, (14,)),
        (30, 2, (1, 27)),
        (33, 3, (1, 16, 30)),
        (31, 3, (1, 14, 28)),
    ],
)
def test_missing_taps_are_spread_as_zlab_does(num_target_layers, num_draft_layers, taps):
    """31 layers: 1 + 13.5 = 14.5 rounds to the even 14, as Python does."""
    assert default_target_layer_ids(num_target_layers, num_draft_layers) == taps


def test_a_config_without_taps_uses_the_default_ones():
    data = layouts.zlab_config(layouts.plain_dflash_config())
    del data["dflash_config"]["target_layer_ids"]
    assert resolve(data).target_layer_ids == (1, 3)


def test_speculators_taps_are_counted_from_one_and_may_be_the_embedding():
    data = layouts.speculators_config(layouts.drafter_config(target_layer_ids=(-1, 0, 4)))
    assert data["aux_hidden_state_layer_ids"] == [0, 1, 5]
    assert resolve(data).target_layer_ids == (-1, 0, 4)


def test_the_mask_id_is_looked_for_in_the_documented_order():
    data = layouts.zlab_config(layouts.plain_dflash_config())
    data.update(mask_token_id=7, dspark_noise_token_id=8)
    assert resolve(data).mask_token_id == 60
    del data["dflash_config"]["mask_token_id"]
    assert resolve(data).mask_token_id == 7
    del data["mask_token_id"]
    assert resolve(data).mask_token_id == 8
    del data["dspark_noise_token_id"]
    with pytest.raises(CheckpointError, match="no mask token"):
        resolve(data)


def test_rope_is_read_from_both_spellings():
    data = layouts.deepspec_config(layouts.drafter_config())
    scaling = {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = {**data, "rope_scaling": scaling, "rope_theta": 5e5}
    new = {**data, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    del new["rope_scaling"], new["rope_theta"]
    expected = RopeScaling(2.0, 1.0, 4.0, 64)
    for config in (resolve(old), resolve(new)):
        assert (config.rope_theta, config.rope_scaling) == (5e5, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4"),
        ({"model_type": "gemma4_text"}, "Gemma 4"),
        ({"model_type": "deepseek_v4"}, "DeepSeek-V4"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepSeek-V4"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"draft_vocab_size": 32}, "draft_vocab_size = 32"),
        ({"projector_type": "domino"}, "projector_type = 'domino'"),
        ({"causal": True}, "causal"),
        ({"attention_mode": "mla"}, "attention_mode"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"draft_adapter_rank": 8}, "draft_adapter_rank"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"markov_head_type": "transformer"}, "markov_head_type = 'transformer'"),
        ({"block_size": None}, "'block_size' is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    data = {**layouts.deepspec_config(layouts.drafter_config()), **changes}
    with pytest.raises(CheckpointError, match=message):
        resolve(data)


def test_a_gemma_backbone_inside_speculators_is_refused_too():
    data = copy.deepcopy(layouts.speculators_config(layouts.drafter_config()))
    data["transformer_layer_config"]["model_type"] = "gemma4_text"
    with pytest.raises(CheckpointError, match="Gemma 4"):
        resolve(data)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("target_layer_ids", [1, 5], "last target layer must not be tapped"),
        ("target_layer_ids", [1, 6], "target_layer_ids"),
        ("target_layer_ids", [-2, 1], "target_layer_ids"),
        ("mask_token_id", 61, "inside the vocabulary of 61"),
        ("mask_token_id", -1, "inside the vocabulary of 61"),
        ("block_size", 0, "num_drafts"),
    ],
)
def test_impossible_values_are_refused(key, value, message):
    data = {**layouts.deepspec_config(layouts.drafter_config()), key: value}
    with pytest.raises(ConfigError, match=message):
        resolve(data)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 32, "hidden size is 16, the target has 32"),
        ("vocab_size", 64, "vocabulary is 61, the target has 64"),
        ("num_layers", 8, "layer count is 6, the target has 8"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused(field, value, message):
    target: ModelConfig = dataclasses.replace(layouts.TARGET, **{field: value})
    data = layouts.deepspec_config(layouts.drafter_config())
    with pytest.raises(CheckpointError, match=message):
        resolve_drafter_config(data, target)
