# SPDX-License-Identifier: Apache-2.0
"""GGUF files become Hugging Face tensors: dequantised, renamed, q/k rows in their own order."""

from __future__ import annotations

import dataclasses

import gguf
import pytest
import torch

from tests.unit.checkpoints import layouts, tiny_gguf
from trtllm_dspark.checkpoints.gguf_reader import GgufFile
from trtllm_dspark.checkpoints.hf_config import model_config_from_hf
from trtllm_dspark.errors import CheckpointError


@pytest.mark.parametrize("tied", [True, False])
def test_unquantised_tensors_come_back_bit_for_bit(tmp_path, tied):
    model = tiny_gguf.config(tie_word_embeddings=tied)
    stored = tiny_gguf.write_gguf(tmp_path / "m.gguf", model)
    found = dict(GgufFile(tmp_path / "m.gguf").hf_tensors())
    assert set(found) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1"])
def test_quantised_tensors_come_back_as_their_blocks_say(tmp_path, quantization):
    stored = tiny_gguf.write_gguf(tmp_path / "m.gguf", quantization=quantization)
    found = dict(GgufFile(tmp_path / "m.gguf").hf_tensors())
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in stored.items():
        expected = tensor
        if tensor.ndim == 2:
            blocks = gguf.quants.quantize(tensor.numpy(), kind)
            expected = torch.from_numpy(gguf.dequantize(blocks, kind))
            assert not torch.equal(expected, tensor)
        assert torch.equal(found[name], expected), name


def test_the_config_is_the_models(tmp_path):
    model = tiny_gguf.config()
    tiny_gguf.write_gguf(tmp_path / "m.gguf", model)
    data = GgufFile(tmp_path / "m.gguf").hf_config()
    assert model_config_from_hf(data, (2,)) == model
    assert data["rms_norm_eps"] == 1e-5, "the shortest decimal of the stored fp32 value"
    assert data["architectures"] == ["LlamaForCausalLM"]


def test_optional_keys_have_llamas_defaults(tmp_path):
    model = tiny_gguf.config(num_kv_heads=4)
    absent = {
        "llama.attention.head_count_kv": None,
        "llama.rope.freq_base": None,
        "llama.rope.dimension_count": None,
    }
    tiny_gguf.write_gguf(tmp_path / "m.gguf", model, overrides=absent)
    found = model_config_from_hf(GgufFile(tmp_path / "m.gguf").hf_config(), (2,))
    assert found == dataclasses.replace(model, rope_theta=10000.0)


@pytest.mark.parametrize(
    ("overrides", "extra", "message"),
    [
        ({"general.architecture": "qwen2"}, (), "architecture 'qwen2' is not supported"),
        ({"llama.block_count": None}, (), r"'llama\.block_count' is missing"),
        ({"llama.rope.dimension_count": 8}, (), "partial rotary"),
        ({"llama.rope.scaling.type": "yarn"}, (), "rope scaling 'yarn'"),
        ({}, ("rope_freqs.weight",), r"unexpected tensor 'rope_freqs\.weight'"),
        ({}, ("blk.0.attn_q.bias",), r"unexpected tensor 'blk\.0\.attn_q\.bias'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, overrides, extra, message):
    path = tmp_path / "m.gguf"
    tiny_gguf.write_gguf(path, overrides=overrides, extra_tensors=extra)
    with pytest.raises(CheckpointError, match=message):
        list(GgufFile(path).hf_tensors())


def test_a_file_that_is_not_gguf_is_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"no magic here" * 10)
    with pytest.raises(CheckpointError, match=r"cannot read .*m\.gguf as GGUF"):
        GgufFile(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"cannot read .*absent\.gguf as GGUF"):
        GgufFile(tmp_path / "absent.gguf")


def test_the_test_sides_permutation_is_not_the_identity():
    values = layouts.random_tensor("q", (32, 4)).numpy()
    assert (tiny_gguf.permute_rows(values, 2) != values).any()
