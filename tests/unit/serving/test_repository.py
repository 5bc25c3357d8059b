# SPDX-License-Identifier: Apache-2.0
"""Templates agree with the tensor tables, and a rendered repository is complete and valid."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.config import BucketConfig, SystemConfig, from_json_dict
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.serving import tensors
from trtllm_dspark.serving.model_parameters import (
    ENGINE_PARAMETERS,
    ModelParameters,
    read_system_config,
)
from trtllm_dspark.serving.repository import (
    CONFIG_FILE,
    MODELS,
    STRUCTURAL_KEYS,
    RepositoryOptions,
    render_repository,
    template_dir,
)
from trtllm_dspark.serving.template import fill_template, template_keys

TABLES = {
    "ensemble": (tensors.TEXT_INPUTS, tensors.TEXT_OUTPUTS),
    "tensorrt_llm_bls": (tensors.BLS_INPUTS, tensors.TEXT_OUTPUTS),
    "tensorrt_llm": (tensors.ENGINE_INPUTS, tensors.ENGINE_OUTPUTS),
    "preprocessing": (tensors.PREPROCESSING_INPUTS, tensors.PREPROCESSING_OUTPUTS),
    "postprocessing": (tensors.POSTPROCESSING_INPUTS, tensors.POSTPROCESSING_OUTPUTS),
}
UPSTREAM_KEYS = {
    "ensemble": "triton_max_batch_size logits_datatype",
    "preprocessing": "triton_max_batch_size max_queue_delay_microseconds max_queue_size "
    "tokenizer_dir add_special_tokens multimodal_model_path engine_dir max_num_images "
    "hf_model_path preprocessing_instance_count",
    "postprocessing": "triton_max_batch_size tokenizer_dir skip_special_tokens "
    "postprocessing_instance_count",
    "tensorrt_llm_bls": "triton_max_batch_size decoupled_mode logits_datatype accumulate_tokens "
    "tensorrt_llm_model_name tensorrt_llm_draft_model_name multimodal_encoders_name "
    "bls_instance_count",
    "tensorrt_llm": "triton_backend triton_max_batch_size decoupled_mode "
    "max_queue_delay_microseconds max_queue_size encoder_input_features_data_type "
    "logits_datatype prompt_embedding_table_data_type max_beam_width batching_strategy engine_dir "
    "encoder_engine_dir max_tokens_in_paged_kv_cache max_attention_window_size sink_token_length "
    "batch_scheduler_policy kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction "
    "kv_cache_host_memory_bytes kv_cache_onboard_blocks enable_trt_overlap "
    "exclude_input_in_output cancellation_check_period_ms stats_check_period_ms "
    "iter_stats_max_iterations request_stats_max_iterations enable_kv_cache_reuse "
    "normalize_log_probs enable_chunked_context gpu_device_ids participant_ids num_nodes "
    "lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction "
    "lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode lookahead_window_size "
    "lookahead_ngram_size lookahead_verification_set_size medusa_choices eagle_choices "
    "gpu_weights_percent enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode "
    "cuda_graph_cache_size speculative_decoding_fast_logits tokenizer_dir "
    "guided_decoding_backend xgrammar_tokenizer_info_path",
}


def parse(text: str) -> Any:
    """A config.pbtxt as the server's own message."""
    text_format = importlib.import_module("google.protobuf.text_format")
    messages = importlib.import_module("tritonclient.grpc.model_config_pb2")
    return text_format.Parse(text, messages.ModelConfig())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


@pytest.fixture
def rendered(tmp_path: Path, model_dir: Path) -> Path:
    config = SystemConfig(model_dir=str(model_dir), buckets=BucketConfig(max_num_requests=5))
    return render_repository(config, tmp_path / "repository")


@pytest.mark.parametrize("model", MODELS)
def test_a_rendered_model_has_the_tensors_of_the_tables(rendered: Path, model: str) -> None:
    config = parse((rendered / model / "config.pbtxt").read_text())
    inputs, outputs = TABLES[model]
    filled = {"logits_datatype": "FP32"}

    def datatype(spec: Any) -> str:
        name = spec.datatype
        if name.startswith("${"):
            name = filled.get(name[2:-1], "FP16")
        return f"TYPE_{name}"

    enum = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type
    found_in = {
        i.name: (enum.values_by_number[i.data_type].name, tuple(i.dims), i.optional)
        for i in config.input
    }
    found_out = {
        o.name: (enum.values_by_number[o.data_type].name, tuple(o.dims)) for o in config.output
    }
    assert found_in == {s.name: (datatype(s), s.dims, not s.required) for s in inputs}
    assert found_out == {s.name: (datatype(s), s.dims) for s in outputs}
    assert (config.name, config.backend, config.max_batch_size) == (model, "python", 5)


@pytest.mark.parametrize("model", MODELS)
def test_templates_accept_every_upstream_key(model: str) -> None:
    text = (template_dir() / model / "config.pbtxt").read_text()
    fill_template(text, dict.fromkeys(UPSTREAM_KEYS[model].split(), "1"))


@pytest.mark.parametrize("model", MODELS)
def test_only_structural_keys_stand_outside_strings(model: str) -> None:
    text = (template_dir() / model / "config.pbtxt").read_text()
    bare = {
        key
        for key in template_keys(text)
        if text.count(f"${{{key}}}") != text.count(f'"${{{key}}}"')
    }
    assert bare <= set(STRUCTURAL_KEYS)


@pytest.mark.parametrize("model", MODELS)
def test_model_files_only_import_the_serving_room(model: str) -> None:
    lines = (template_dir() / model / "1" / "model.py").read_text().splitlines()
    imports = [line for line in lines if line.startswith(("import", "from"))]
    assert len(imports) == 1 and imports[0].startswith("from trtllm_dspark.serving.")


def test_the_configuration_survives_rendering(rendered: Path, model_dir: Path) -> None:
    data = json.loads((rendered / "tensorrt_llm" / CONFIG_FILE).read_text())
    config = from_json_dict(SystemConfig, data)
    assert config.buckets.max_num_requests == 5
    assert config.model_dir == str(model_dir.resolve())


def test_an_existing_directory_is_left_alone(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "repository").mkdir()
    with pytest.raises(ConfigError, match="exists: choose another directory"):
        render_repository(SystemConfig(model_dir=str(model_dir)), tmp_path / "repository")


def test_without_decoupling_every_model_is_unary(tmp_path: Path, model_dir: Path) -> None:
    config = SystemConfig(model_dir=str(model_dir))
    output = render_repository(config, tmp_path / "r", RepositoryOptions(decoupled=False))
    for model in MODELS:
        parsed = parse((output / model / "config.pbtxt").read_text())
        assert not parsed.model_transaction_policy.decoupled


def make_parameters(**values: str) -> ModelParameters:
    parameters = {key: {"string_value": value} for key, value in values.items()}
    return ModelParameters({"max_batch_size": 4, "parameters": parameters})


def test_unfilled_parameters_are_unset() -> None:
    parameters = make_parameters(gpt_model_path="${engine_dir}", drafter="ngram")
    assert parameters.values == {"drafter": "ngram"}


def test_upstream_parameters_make_a_system() -> None:
    config = read_system_config(
        make_parameters(
            gpt_model_path="/m",
            max_tokens_in_paged_kv_cache="100",
            enable_kv_cache_reuse="false",
            max_queue_size="7",
            policy="fixed",
        )
    )
    assert (config.model_dir, config.max_queue_size, config.scheduler.policy) == ("/m", 7, "fixed")
    assert (config.cache.num_pages, config.cache.enable_prefix_reuse) == (5, False)
    assert config.buckets.max_num_requests == 4


def test_a_missing_engine_dir_is_said_so() -> None:
    with pytest.raises(ConfigError, match="engine_dir is not filled"):
        read_system_config(make_parameters())


def test_parameters_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    parameters = make_parameters(gpt_model_path="/m", lora_prefetch_dir="/l", num_nodes="2")
    with caplog.at_level("WARNING"):
        assert parameters.log_unused(ENGINE_PARAMETERS) == ["lora_prefetch_dir", "num_nodes"]
    assert "parameter num_nodes = '2' has no effect here" in caplog.text


@pytest.mark.parametrize("value, expected", [("True", True), ("0", False), ("yes", True)])
def test_flags_are_read_as_upstream_spells_them(value: str, expected: bool) -> None:
    assert make_parameters(x=value).flag("x", not expected) is expected


def test_a_flag_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameter x = 'maybe'"):
        make_parameters(x="maybe").flag("x", True)


SUPPORT_PAGE = template_dir().parent / "docs" / "support.md"


@pytest.mark.parametrize("model", MODELS)
def test_the_support_page_says_of_every_input_what_happens_to_it(model: str) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in SUPPORT_PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    said = {(row[0].split("`")[1], row[4]) for row in rows if len(row) == 6}
    inputs, outputs = TABLES[model]
    assert {(spec.name, spec.support.value) for spec in inputs} <= said
    assert {spec.name for spec in outputs} <= {r[0].split("`")[1] for r in rows if len(r) == 4}


def test_text_models_read_the_tokenizer_settings_of_preprocessing(tmp_path: Path) -> None:
    config = SystemConfig(model_dir=str(tmp_path))
    options = RepositoryOptions(apply_chat_template=True)
    repository = render_repository(config, tmp_path / "models", options)
    found = ModelParameters({}, repository / "ensemble").sibling("preprocessing")
    assert found.text("tokenizer_dir") == str(tmp_path) and found.flag("apply_chat_template", False)
    assert found.text("multimodal_model_path") == "", "an unfilled key is unset"
    with pytest.raises(ConfigError, match=r"config\.pbtxt"):
        ModelParameters({}, repository / "ensemble").sibling("none")
