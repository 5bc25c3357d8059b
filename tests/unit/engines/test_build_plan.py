# SPDX-License-Identifier: Apache-2.0
"""Limits, profiles and refusals of a build, on paper."""

from __future__ import annotations

import dataclasses

import pytest

from trtllm_dspark.config import BucketConfig, DrafterConfig, ModelConfig
from trtllm_dspark.engines.build_plan import (
    BuildShape,
    check_memory,
    estimate_sizes,
    format_plan,
    plan_limits,
)
from trtllm_dspark.engines.build_profiles import (
    EngineLimits,
    Range,
    drafter_profiles,
    target_profiles,
)
from trtllm_dspark.engines.build_tensorrt import BuildOptions
from trtllm_dspark.errors import ConfigError

MODEL = ModelConfig(
    vocab_size=100, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16
)
DRAFTER = DrafterConfig(
    vocab_size=100,
    target_hidden_size=64,
    num_target_layers=4,
    num_drafts=7,
    target_layer_ids=(0, 2),
)
SHAPE = BuildShape(BucketConfig(max_num_requests=4, max_num_tokens=64), max_seq_len=100)
RUNGS, BUCKETS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)


def limits(shape: BuildShape = SHAPE, drafter: DrafterConfig | None = DRAFTER) -> EngineLimits:
    return plan_limits(shape, MODEL, drafter, RUNGS, BUCKETS)


def test_pages_are_enough_for_full_sequences_with_their_blocks_and_the_scratch_page():
    # 100 tokens, 7 block rows and one more are 4 pages of 32.
    assert limits().num_pages == 4 * 4 + 1
    assert limits().max_table_width == 4
    unshifted = dataclasses.replace(DRAFTER, label_shift=False)
    assert limits(drafter=unshifted).block_len == 8


@pytest.mark.parametrize(
    "changes,drafter,message",
    [
        ({"max_draft_len": 5}, DRAFTER, "max_draft_len = 5 .* left out or 7"),
        ({"max_draft_len": 5}, None, "max_draft_len = 5 .* there is no drafter"),
        (
            {"buckets": BucketConfig(max_num_requests=16, max_num_tokens=64)},
            DRAFTER,
            "max_num_tokens = 64 .* ≥ 128",
        ),
        ({"max_seq_len": 4096}, DRAFTER, "max_seq_len = 4096 .* ≤ 2048"),
        ({"max_input_len": 100}, DRAFTER, "max_input_len = 100"),
        ({"num_pages": 4}, DRAFTER, "num_pages = 4 .* ≥ 5"),
        ({}, dataclasses.replace(DRAFTER, target_hidden_size=32), "made for this target"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_value_and_what_is_allowed(
    changes, drafter, message
):
    with pytest.raises(ConfigError, match=message):
        limits(dataclasses.replace(SHAPE, **changes), drafter)


def test_sizes_count_pages_twice_where_they_are_not_updated_in_place():
    once = estimate_sizes(MODEL, DRAFTER, limits(), "bfloat16", in_place=True)
    twice = estimate_sizes(MODEL, DRAFTER, limits(), "bfloat16", in_place=False)
    per_row = 2 * (4 * 2 * 16 + 2 * 4 * 64) * 2
    assert once.kv_bytes == 17 * 32 * per_row
    assert twice.kv_bytes == 2 * once.kv_bytes and twice.weight_bytes == once.weight_bytes


def test_engine_sizes_of_the_demo_model_are_about_those_that_were_built():
    """SmolLM2-135M with its drafter, 27 and 6 profiles: 804 MB and 134 MB (docs/engines.md)."""
    model = ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    drafter = DrafterConfig(
        hidden_size=576, intermediate_size=1536, num_layers=3, num_heads=9, num_kv_heads=3,
        head_dim=64, vocab_size=49152, target_hidden_size=576, num_target_layers=30,
        target_layer_ids=(1, 7, 14, 21, 28), head_type="markov", markov_rank=64,
    )  # fmt: skip
    profiles = EngineLimits(tuple(range(1, 28)), (1, 2, 4, 8, 16), 7, 7, 2048, 32, 1041)
    sizes = estimate_sizes(model, drafter, profiles, "bfloat16", in_place=False)
    target = sizes.target_weight_bytes + sizes.target_extra_bytes
    assert target == pytest.approx(804e6, rel=0.02)
    drafts = sizes.drafter_weight_bytes + sizes.drafter_extra_bytes
    assert drafts == pytest.approx(134e6, rel=0.1)


def test_a_plan_without_a_drafter_says_so():
    sizes = estimate_sizes(MODEL, None, limits(drafter=None), "bfloat16", in_place=False)
    assert format_plan(limits(drafter=None), [], sizes).endswith(" of weights), no drafter")


def test_separate_engines_hold_the_weights_once_each():
    once = estimate_sizes(MODEL, DRAFTER, limits(), "bfloat16", in_place=True)
    each = estimate_sizes(MODEL, DRAFTER, limits(), "bfloat16", in_place=True, separate=True)
    assert each.target_weight_bytes == len(RUNGS) * once.target_weight_bytes
    assert each.total_bytes - once.total_bytes == (len(RUNGS) - 1) * once.target_weight_bytes


def test_memory_that_does_not_suffice_is_refused():
    sizes = estimate_sizes(MODEL, DRAFTER, limits(), "bfloat16", in_place=True)
    check_memory(SHAPE, sizes)
    check_memory(dataclasses.replace(SHAPE, gpu_memory_gb=24.0), sizes)
    with pytest.raises(ConfigError, match="lower num_pages"):
        check_memory(dataclasses.replace(SHAPE, gpu_memory_gb=0.001), sizes)


def test_a_rung_fixes_all_but_query_length_and_table_width():
    profile = target_profiles(limits())[4]
    assert profile.name == "rung 16"
    varying = {name for name, r in profile.inputs.items() if r.min != r.max}
    assert varying == {"query_offsets", "page_table"}
    assert profile.inputs["page_table"] == Range((4, 1), (4, 4), (4, 4))
    assert profile.inputs["query_offsets"] == Range((1,), (8,), (16,))
    assert profile.inputs["cu_query_lens"].max == (5,)


def test_few_rows_hold_few_requests_and_many_rows_only_the_logits_that_can_be_wanted():
    small, large = target_profiles(limits())[0], target_profiles(limits())[-1]
    assert small.inputs["context_lens"].max == (1,)
    assert large.inputs["context_lens"].max == (4,)
    assert large.inputs["logit_rows"].max == (32,)


def test_drafting_profiles_take_a_whole_step_of_context_rows_and_appends_come_last():
    profiles = drafter_profiles(limits(), 128)
    assert [p.name for p in profiles] == ["1 requests", "2 requests", "4 requests", "append 64"]
    assert profiles[1].inputs["taps"] == Range((1, 128), (16, 128), (16, 128))
    assert profiles[1].inputs["anchor_ids"].min == (2,)
    assert profiles[-1].inputs["row_slots"].max == (64,)


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(backend="onnx"), "backend = 'onnx'"),
        (dict(compute_capabilities=("9.0",)), "compute_capability = '9.0' .* 8.9"),
        (dict(compute_capabilities=()), "named for TensorRT-RTX"),
        (dict(backend="tensorrt"), r"builds for the GPU it finds"),
        (dict(profiling_verbosity="loud"), "profiling_verbosity = 'loud'"),
    ],
)
def test_builder_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BuildOptions(**options)


@pytest.mark.parametrize("rungs,buckets", [((), (1,)), ((2, 1), (1,)), ((1,), (2, 2)), ((1,), ())])
def test_ladders_and_buckets_ascend(rungs, buckets):
    with pytest.raises(ConfigError, match=r"ascending|one or more"):
        EngineLimits(rungs, buckets, 0, 0, 16, 4, 5)
