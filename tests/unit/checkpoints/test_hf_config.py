# SPDX-License-Identifier: Apache-2.0
"""Hugging Face configs of Llama and Qwen3, old and new spelling; the rest is refused by name."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, Qwen3Config

from tests.unit.checkpoints import layouts
from trtllm_dspark.checkpoints import load_model_config
from trtllm_dspark.checkpoints.hf_config import model_config_from_hf
from trtllm_dspark.config import ModelConfig, RopeScaling
from trtllm_dspark.errors import CheckpointError, ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes):
    config = ModelConfig(architecture="llama", eos_token_ids=(2,))
    return {**layouts.hf_target_config(config), **changes}


def write(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(directory)


def test_a_qwen3_config_gives_back_what_it_was_made_of(tmp_path):
    assert write(tmp_path, layouts.hf_target_config(layouts.TARGET)) == layouts.TARGET


def test_configs_saved_by_transformers_are_read(tmp_path):
    shape = dict(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    rope = {**LLAMA3, "rope_theta": 5e5}
    LlamaConfig(**shape, rope_parameters=rope, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path / "llama"
    )
    found = load_model_config(tmp_path / "llama")
    assert (found.architecture, found.qk_norm, found.head_dim) == ("llama", False, 8)
    assert (found.rope_theta, found.rope_scaling) == (5e5, RopeScaling(32.0, 1.0, 4.0, 8192))
    assert found.tie_word_embeddings and found.num_layers == 3 and found.vocab_size == 101
    Qwen3Config(
        **shape, head_dim=16, attention_bias=True, architectures=["Qwen3ForCausalLM"]
    ).save_pretrained(tmp_path / "qwen3")
    found = load_model_config(tmp_path / "qwen3")
    assert (found.architecture, found.qk_norm, found.head_dim) == ("qwen3", True, 16)
    assert found.attention_bias and found.rope_scaling is None


def test_rope_is_the_same_in_both_spellings():
    old = model_config_from_hf(llama(rope_theta=1e5, rope_scaling=LLAMA3), ())
    new = llama(rope_parameters={**LLAMA3, "rope_theta": 1e5})
    del new["rope_theta"], new["rope_scaling"]
    nested = llama(rope_parameters={"full_attention": {**LLAMA3, "rope_theta": 1e5}})
    for data in (new, nested):
        assert model_config_from_hf(data, ()) == old
    assert old.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_defaults_are_those_of_the_hugging_face_classes():
    data = llama()
    for key in ("head_dim", "num_key_value_heads", "attention_bias", "tie_word_embeddings"):
        del data[key]
    config = model_config_from_hf(data, ())
    assert (config.head_dim, config.num_kv_heads) == (64, 4)
    assert not config.attention_bias and not config.tie_word_embeddings
    qwen3 = layouts.hf_target_config(layouts.TARGET)
    del qwen3["head_dim"]
    assert model_config_from_hf(qwen3, ()).head_dim == 128


@pytest.mark.parametrize(
    ("config_value", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        (2, {"temperature": 0.7}, (2,)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path, config_value, generation, expected
):
    assert write(tmp_path, llama(eos_token_id=config_value), generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_heads/num_kv_heads"),
    ],
)
def test_what_the_target_model_cannot_compute_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, llama(**changes))


def test_a_missing_key_is_named_with_the_file(tmp_path):
    data = llama()
    del data["intermediate_size"]
    with pytest.raises(CheckpointError, match=r"config\.json: key 'intermediate_size' is missing"):
        write(tmp_path, data)
