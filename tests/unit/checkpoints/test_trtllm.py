# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM checkpoints: documented names, shards and configs; nothing is lost either way."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoints import layouts, tiny_gguf
from trtllm_dspark.checkpoints import (
    convert_from_trtllm,
    convert_to_trtllm,
    load_drafter,
    load_model_config,
    load_target_weights,
    load_tokenizer,
    load_trtllm_checkpoint,
    prepare_model,
    write_trtllm_checkpoint,
)
from trtllm_dspark.config import RopeScaling
from trtllm_dspark.errors import CheckpointError

QWEN3 = dataclasses.replace(layouts.TARGET, num_layers=2)
LLAMA = dataclasses.replace(QWEN3, architecture="llama", qk_norm=False)
VARIANTS = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "tied": dataclasses.replace(LLAMA, tie_word_embeddings=True),
    "bias": dataclasses.replace(LLAMA, attention_bias=True),
    "rope": dataclasses.replace(LLAMA, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 64)),
}


def unified(config, tmp_path, dtype=torch.float32):
    layouts.write_hf_target(tmp_path / "hf", config, dtype=dtype)
    return load_target_weights(tmp_path / "hf", config)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_there_and_back_keeps_every_bit(tmp_path, variant, tp_size):
    config = VARIANTS[variant]
    stored = layouts.write_hf_target(tmp_path / "hf", config, dtype=torch.bfloat16)
    convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt", tp_size=tp_size)
    ranks = sorted(path.name for path in (tmp_path / "ckpt").glob("*.safetensors"))
    assert ranks == [f"rank{rank}.safetensors" for rank in range(tp_size)]
    found, weights = load_trtllm_checkpoint(tmp_path / "ckpt")
    assert found == config
    expected = load_target_weights(tmp_path / "hf", config)
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    convert_from_trtllm(tmp_path / "ckpt", tmp_path / "back")
    assert load_model_config(tmp_path / "back") == config
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(stored)
    for name, tensor in stored.items():
        assert back[name].dtype == torch.bfloat16 and torch.equal(back[name], tensor), name


@pytest.mark.parametrize("parallel", [False, True])
def test_two_ranks_hold_the_documented_rows_and_columns(tmp_path, parallel):
    """Heads: 4 query, 2 K/V, head_dim 8; hidden 16; inner 24; vocabulary 61, padded to 62."""
    tensors = layouts.write_hf_target(tmp_path / "hf", QWEN3)
    convert_to_trtllm(
        tmp_path / "hf", tmp_path / "ckpt", tp_size=2, use_parallel_embedding=parallel
    )
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    zero = torch.zeros(1, 16)
    for rank in (0, 1):
        shard = load_file(tmp_path / "ckpt" / f"rank{rank}.safetensors")
        rows = {"vocab": [embedding[:31], torch.cat([embedding[31:], zero])][rank]}
        expected = {
            "transformer.vocab_embedding.weight": rows["vocab"] if parallel else embedding,
            "transformer.ln_f.weight": tensors["model.norm.weight"],
            "lm_head.weight": [head[:31], torch.cat([head[31:], zero])][rank],
        }
        for layer in range(2):
            hf = {
                name.removeprefix(f"model.layers.{layer}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            q = hf["self_attn.q_proj.weight"][16 * rank : 16 * rank + 16]
            k = hf["self_attn.k_proj.weight"][8 * rank : 8 * rank + 8]
            v = hf["self_attn.v_proj.weight"][8 * rank : 8 * rank + 8]
            inner = slice(12 * rank, 12 * rank + 12)
            layer_expected = {
                "input_layernorm.weight": hf["input_layernorm.weight"],
                "post_layernorm.weight": hf["post_attention_layernorm.weight"],
                "attention.qkv.weight": torch.cat([q, k, v]),
                "attention.dense.weight": hf["self_attn.o_proj.weight"][
                    :, 16 * rank : 16 * rank + 16
                ],
                "attention.q_layernorm.weight": hf["self_attn.q_norm.weight"],
                "attention.k_layernorm.weight": hf["self_attn.k_norm.weight"],
                "mlp.fc.weight": hf["mlp.gate_proj.weight"][inner],
                "mlp.gate.weight": hf["mlp.up_proj.weight"][inner],
                "mlp.proj.weight": hf["mlp.down_proj.weight"][:, inner],
            }
            expected.update(
                {f"transformer.layers.{layer}.{n}": t for n, t in layer_expected.items()}
            )
        assert set(shard) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(shard[name], tensor), name


def test_kv_heads_are_repeated_where_ranks_outnumber_them(tmp_path):
    tensors = layouts.write_hf_target(tmp_path / "hf", LLAMA)
    convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt", tp_size=4)
    for rank in range(4):
        shard = load_file(tmp_path / "ckpt" / f"rank{rank}.safetensors")
        qkv = shard["transformer.layers.1.attention.qkv.weight"]
        q = tensors["model.layers.1.self_attn.q_proj.weight"][8 * rank : 8 * rank + 8]
        head = slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        k = tensors["model.layers.1.self_attn.k_proj.weight"][head]
        v = tensors["model.layers.1.self_attn.v_proj.weight"][head]
        assert torch.equal(qkv, torch.cat([q, k, v]))


def test_the_config_has_the_documented_keys_and_values(tmp_path):
    config = dataclasses.replace(QWEN3, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 64))
    (tmp_path / "ckpt").mkdir()
    weights = unified(config, tmp_path, torch.float16)
    write_trtllm_checkpoint(tmp_path / "ckpt", config, weights, tp_size=2)
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text()) == {
        "architecture": "Qwen3ForCausalLM",
        "dtype": "float16",
        "logits_dtype": "float32",
        "vocab_size": 61,
        "max_position_embeddings": 256,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 8,
        "hidden_act": "silu",
        "intermediate_size": 24,
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 1e6,
        "rotary_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "attn_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "qwen_type": "qwen3",
    }


def test_a_checkpoint_made_elsewhere_loads(tmp_path):
    """As the upstream converter leaves it: more keys, hidden-sharded embedding, no tied head."""
    tensors = layouts.hf_target_tensors(VARIANTS["tied"])
    config = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "hidden_act": "swiglu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "logits_dtype": "float32",
        "mapping": {"world_size": 2, "gpus_per_node": 8, "cp_size": 1, "tp_size": 2, "pp_size": 1},
        "max_position_embeddings": 256,
        "moe": {"num_experts": 0, "top_k": 0},
        "norm_epsilon": 1e-6,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "position_embedding_type": "rope_gpt_neox",
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
        "rotary_base": 1e6,
        "rotary_scaling": None,
        "head_size": 8,
        "qk_layernorm": False,
        "rotary_embedding_dim": 8,
        "runtime_defaults": None,
        "tie_word_embeddings": True,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 1,
        "vocab_size": 61,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    for rank in (0, 1):
        shard = {
            "transformer.vocab_embedding.weight": tensors["model.embed_tokens.weight"].chunk(2, 1)[
                rank
            ],
            "transformer.ln_f.weight": tensors["model.norm.weight"],
        }
        for layer in (0, 1):
            old, new = f"model.layers.{layer}.", f"transformer.layers.{layer}."
            pick = {
                name: tensors[old + name].chunk(2, dim)[rank]
                for name, dim in (
                    ("self_attn.q_proj.weight", 0),
                    ("self_attn.k_proj.weight", 0),
                    ("self_attn.v_proj.weight", 0),
                    ("self_attn.o_proj.weight", 1),
                    ("mlp.gate_proj.weight", 0),
                    ("mlp.up_proj.weight", 0),
                    ("mlp.down_proj.weight", 1),
                )
            }
            qkv = [pick[f"self_attn.{part}_proj.weight"] for part in ("q", "k", "v")]
            shard[new + "input_layernorm.weight"] = tensors[old + "input_layernorm.weight"]
            shard[new + "post_layernorm.weight"] = tensors[old + "post_attention_layernorm.weight"]
            shard[new + "attention.qkv.weight"] = torch.cat(qkv)
            shard[new + "attention.dense.weight"] = pick["self_attn.o_proj.weight"]
            shard[new + "mlp.fc.weight"] = pick["mlp.gate_proj.weight"]
            shard[new + "mlp.gate.weight"] = pick["mlp.up_proj.weight"]
            shard[new + "mlp.proj.weight"] = pick["mlp.down_proj.weight"]
        shard = {name: tensor.clone().contiguous() for name, tensor in shard.items()}
        save_file(shard, tmp_path / f"rank{rank}.safetensors")
    found, weights = load_trtllm_checkpoint(tmp_path)
    assert found == VARIANTS["tied"]
    expected = unified(VARIANTS["tied"], tmp_path)
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_qwen3_checkpoint_made_elsewhere_loads(tmp_path):
    """The keys that the upstream converter writes for Qwen3, which has no attention bias."""
    layouts.write_hf_target(tmp_path / "hf", QWEN3)
    path = convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt") / "config.json"
    ours = json.loads(path.read_text())
    shared = (
        "architecture vocab_size hidden_size num_hidden_layers num_attention_heads head_size "
        "num_key_value_heads intermediate_size norm_epsilon max_position_embeddings rotary_base"
    )
    upstream = {
        "dtype": "float32",
        "logits_dtype": "float32",
        "hidden_act": "silu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": None,
        "rotary_scaling": None,
        "mapping": {"world_size": 1, "gpus_per_node": 8, "cp_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mlp_bias": False,
        "attn_bias": False,
        "disable_weight_only_quant_plugin": False,
        "seq_length": 8192,
        "use_logn_attn": False,
        "qwen_type": "qwen3",
        "moe": {"num_experts": 0, "top_k": 0, "normalization_mode": 0},
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "num_labels": 1,
        "tie_word_embeddings": False,
    }
    path.write_text(json.dumps({**{key: ours[key] for key in shared.split()}, **upstream}))
    found, weights = load_trtllm_checkpoint(tmp_path / "ckpt")
    assert found == QWEN3
    expected = load_target_weights(tmp_path / "hf", QWEN3)
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_drafter_and_the_tokenizer_travel_along(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    model = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "model", dtype="float32")
    target = load_model_config(model)
    drafter = layouts.drafter_config(
        hidden_size=64,
        target_hidden_size=64,
        vocab_size=target.vocab_size,
        num_target_layers=2,
        target_layer_ids=(-1, 0),
    )
    layouts.write_specforge(tmp_path / "drafter", drafter)
    convert_to_trtllm(model, tmp_path / "ckpt", drafter_dir=tmp_path / "drafter", label_shift=True)
    back = convert_from_trtllm(tmp_path / "ckpt", tmp_path / "back")
    original = load_drafter(tmp_path / "drafter", target, label_shift=True)
    for place in (tmp_path / "ckpt", back):
        config, weights = load_drafter(place / "drafter", target)
        assert config == original[0] == drafter
        assert all(torch.equal(weights[name], tensor) for name, tensor in original[1].items())
        assert load_tokenizer(place).encode("hello 12") == load_tokenizer(model).encode("hello 12")
        assert load_tokenizer(place).eos_ids == (2,)


def test_a_named_dtype_rounds_and_a_mixture_needs_one(tmp_path):
    weights = unified(LLAMA, tmp_path)
    mixed = {**weights, "norm.weight": weights["norm.weight"].double()}
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(CheckpointError, match="mixes the dtypes float32, float64"):
        write_trtllm_checkpoint(tmp_path / "ckpt", LLAMA, mixed)
    write_trtllm_checkpoint(tmp_path / "ckpt", LLAMA, mixed, dtype="bfloat16")
    _, found = load_trtllm_checkpoint(tmp_path / "ckpt")
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    with pytest.raises(CheckpointError, match="dtype 'int8' is not allowed"):
        write_trtllm_checkpoint(tmp_path / "ckpt", LLAMA, weights, dtype="int8")


@pytest.mark.parametrize("tp_size", [0, 3, 8])
def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path, tp_size):
    layouts.write_hf_target(tmp_path / "hf", LLAMA)
    with pytest.raises(CheckpointError, match=f"tp_size = {tp_size} does not fit 4 query heads"):
        convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt", tp_size=tp_size)
    assert not (tmp_path / "ckpt").exists()


def test_what_tensorrt_llm_cannot_hold_is_refused(tmp_path):
    config = dataclasses.replace(QWEN3, attention_bias=True)
    layouts.write_hf_target(tmp_path / "hf", config)
    with pytest.raises(CheckpointError, match="Qwen3 has no attention bias"):
        convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt")


@pytest.fixture
def two_ranks(tmp_path):
    layouts.write_hf_target(tmp_path / "hf", VARIANTS["tied"])
    return convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt", tp_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "GPTForCausalLM"}, "architecture 'GPTForCausalLM' is not supported"),
        ({"quantization": {"quant_algo": "FP8"}}, r"quant_algo = 'FP8'"),
        ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo = 'INT8'"),
        ({"mapping": {"tp_size": 1, "pp_size": 2}}, r"mapping\.pp_size = 2"),
        ({"mapping": {"tp_size": 1, "cp_size": 2}}, r"mapping\.cp_size = 2"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe": {"num_experts": 8}}, r"moe\.num_experts = 8"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ({"rotary_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"use_parallel_embedding": True, "embedding_sharding_dim": 2}, "embedding_sharding_dim"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(two_ranks, changes, message):
    path = two_ranks / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        load_trtllm_checkpoint(two_ranks)


def test_a_missing_key_and_a_missing_rank_are_named(two_ranks):
    (two_ranks / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither rank1\.safetensors"):
        load_trtllm_checkpoint(two_ranks)
    path = two_ranks / "config.json"
    data = json.loads(path.read_text())
    del data["intermediate_size"]
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="key 'intermediate_size' is missing"):
        load_trtllm_checkpoint(two_ranks)


@pytest.mark.parametrize(
    ("rank", "name", "tensor", "message"),
    [
        (1, "transformer.ln_f.weight", torch.zeros(16), r"ln_f\.weight differs between ranks"),
        (1, "transformer.ln_f.weight", None, r"rank1\.safetensors: .*missing: transformer\.ln_f"),
        (0, "transformer.extra", torch.zeros(1), r"unexpected: transformer\.extra"),
        (
            0,
            "transformer.layers.0.mlp.fc.weight",
            torch.zeros(24, 16),
            r"misshaped: .*mlp\.fc\.weight \[24, 16\] \(expected \[12, 16\]\)",
        ),
        (0, "lm_head.weight", torch.zeros(31, 16), r"lm_head\.weight differs from"),
    ],
)
def test_wrong_shards_are_named(two_ranks, rank, name, tensor, message):
    path = two_ranks / f"rank{rank}.safetensors"
    shard = load_file(path)
    shard.pop(name, None)
    if tensor is not None:
        shard[name] = tensor
    save_file(shard, path)
    with pytest.raises(CheckpointError, match=message):
        load_trtllm_checkpoint(two_ranks)


def test_repeated_kv_heads_must_agree(tmp_path):
    layouts.write_hf_target(tmp_path / "hf", LLAMA)
    ckpt = convert_to_trtllm(tmp_path / "hf", tmp_path / "ckpt", tp_size=4)
    shard = load_file(ckpt / "rank3.safetensors")
    shard["transformer.layers.0.attention.qkv.weight"][8] += 1
    save_file(shard, ckpt / "rank3.safetensors")
    with pytest.raises(CheckpointError, match=r"attention\.qkv\.weight differs between ranks"):
        load_trtllm_checkpoint(ckpt)


def test_existing_directories_are_left_alone(two_ranks, tmp_path):
    with pytest.raises(CheckpointError, match="choose another directory"):
        convert_to_trtllm(tmp_path / "hf", two_ranks)
    with pytest.raises(CheckpointError, match="choose another directory"):
        convert_from_trtllm(two_ranks, tmp_path / "hf")
