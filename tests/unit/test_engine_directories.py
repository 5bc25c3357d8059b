# SPDX-License-Identifier: Apache-2.0
"""A built directory is served like a model directory: from `dspark build` to tokens."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.e2e.tiny_model import write_tiny_drafter, write_tiny_model
from tests.unit.decoding.loops import generate, request
from tests.unit.engines.test_engine_dir import FACTS
from trtllm_dspark import runtime
from trtllm_dspark.build_command import main as build
from trtllm_dspark.config import BucketConfig, SchedulerConfig, SystemConfig
from trtllm_dspark.engines.engine_dir import write_config, write_manifest
from trtllm_dspark.errors import EngineError
from trtllm_dspark.serving.model_parameters import ModelParameters, read_system_config
from trtllm_dspark.serving.preprocessing_model import load_vocab_size
from trtllm_dspark.serving.repository import render_repository, template_dir
from trtllm_dspark.serving.server import running_server
from trtllm_dspark.serving.template import template_keys

LIMITS = ["--max_batch_size=3", "--max_num_tokens=48", "--max_seq_len=96", "--ratios=0.5,1.0"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    write_tiny_drafter(directory)
    return directory


@pytest.fixture(scope="module")
def engine_dir(model_dir, tmp_path_factory):
    output = tmp_path_factory.mktemp("engines") / "tiny"
    paths = ["--model-dir", str(model_dir), "--output-dir", str(output)]
    assert build([*paths, "--backend", "torch", "--dtype", "float32", *LIMITS]) == 0
    return output


def served(path, **changes) -> runtime.System:
    fields = dict(
        model_dir=str(path),
        num_threads=1,
        scheduler=SchedulerConfig(policy="fixed"),
        profile="never",
    )
    return runtime.build_system(SystemConfig(**{**fields, **changes}))


def tokens(system: runtime.System) -> dict[str, list[int]]:
    prompts = [b"one engine", b"directory of any backend", b"is served"]
    requests = [request(i, list(prompt), max_tokens=20) for i, prompt in enumerate(prompts)]
    return generate(system.loop, requests)


def test_a_torch_directory_answers_like_its_model_with_the_limits_it_was_built_with(
    model_dir, engine_dir
):
    system = served(engine_dir)
    buckets = BucketConfig(max_num_requests=3, max_num_tokens=48, ratios=(0.5, 1.0))
    assert system.loop.drafter.name == "dspark"
    assert (system.info.max_num_requests, system.info.max_seq_len) == (3, 96)
    assert system.info.rungs[-1] == 48 and system.info.num_pages == 3 * 4 + 1
    assert system.tokenizer.eos_ids == (256,)
    plain = served(
        model_dir,
        dtype="float32",
        buckets=buckets,
        scheduler=SchedulerConfig(policy="autoregressive"),
    )
    assert tokens(system) == tokens(plain)


def test_engine_dir_of_the_repository_templates_may_be_a_built_directory(engine_dir, tmp_path):
    """What `fill_template.py … engine_dir:DIR` writes, read as the server reads it."""
    filled = {"gpt_model_path": str(engine_dir), "policy": "fixed", "max_seq_len": "4096"}
    parameters = {key: {"string_value": value} for key, value in filled.items()}
    config = read_system_config(ModelParameters({"parameters": parameters, "max_batch_size": 8}))
    system = runtime.build_system(dataclasses.replace(config, num_threads=1))
    assert (system.info.max_num_requests, system.info.max_seq_len) == (3, 96)
    rendered = render_repository(config, tmp_path / "models")
    text = (rendered / "preprocessing" / "config.pbtxt").read_text()
    assert f'string_value: "{engine_dir}"' in text
    assert load_vocab_size(str(engine_dir), system.tokenizer) == 259


def test_the_templates_carry_profile_and_batching_parameters(model_dir):
    filled = {"gpt_model_path": str(model_dir), "profile": "never", "max_num_tokens": "200"}
    parameters = {key: {"string_value": value} for key, value in filled.items()}
    config = read_system_config(ModelParameters({"parameters": parameters, "max_batch_size": 8}))
    assert (config.profile, config.buckets.max_num_requests) == ("never", 8)
    assert config.buckets.max_num_tokens == 200
    text = (template_dir() / "tensorrt_llm" / "config.pbtxt").read_text()
    assert {"engine_dir", "policy", "profile", "max_num_tokens"} <= set(template_keys(text))


def test_text_models_find_end_tokens_beside_the_engines(engine_dir):
    found = json.loads((engine_dir / "generation_config.json").read_text())
    assert found == {"eos_token_id": [256]}


@pytest.fixture
def built_for_a_gpu(engine_dir, tmp_path):
    """A directory whose engine files are never read here."""
    for name in ("rank0.engine", "drafter.engine"):
        (tmp_path / name).write_bytes(b"engine")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((engine_dir / name).read_bytes())
    write_config(tmp_path, FACTS, {"vocab_size": 259}, {})
    write_manifest(tmp_path, FACTS)
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_tensorrt_directory_without_a_gpu_is_refused_in_one_sentence(built_for_a_gpu):
    with pytest.raises(EngineError, match="needs an NVIDIA GPU") as error:
        served(built_for_a_gpu)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_it_is_refused_before_a_server_is_started(built_for_a_gpu, tmp_path):
    config = SystemConfig(model_dir=str(built_for_a_gpu))
    with (
        pytest.raises(EngineError, match="needs an NVIDIA GPU"),
        running_server(config, work_dir=tmp_path / "work"),
    ):
        pass
    assert not (tmp_path / "work").exists()
