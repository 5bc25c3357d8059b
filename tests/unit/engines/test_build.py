# SPDX-License-Identifier: Apache-2.0
"""Real TensorRT-RTX builds on a machine without a GPU, from a model directory to a manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoints import tiny_gguf
from tests.unit.engines.exported import PAGE_SIZE, make_drafter, make_limits, make_target
from trtllm_dspark.build_command import build_parser, main
from trtllm_dspark.checkpoints import (
    convert_to_trtllm,
    load_drafter,
    load_model_config,
    write_drafter,
)
from trtllm_dspark.checkpoints.hf_writer import write_hf_model
from trtllm_dspark.config import BucketConfig, DrafterConfig
from trtllm_dspark.engines.build import BuildJob, builds_beside
from trtllm_dspark.engines.build_profiles import (
    Profile,
    Range,
    drafter_profiles,
    target_profiles,
)
from trtllm_dspark.engines.build_tensorrt import BuildOptions, build_engine
from trtllm_dspark.engines.engine_dir import load_engine_dir
from trtllm_dspark.engines.export import export_drafter, export_target
from trtllm_dspark.errors import CheckpointError, ConfigError, EngineError
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets

HIDDEN = 64


def target_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


DRAFTER = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    vocab_size=128,
    num_drafts=7,
    mask_token_id=127,
    target_layer_ids=(-1, 0),
    num_target_layers=2,
    target_hidden_size=HIDDEN,
    head_type="markov",
    markov_rank=16,
    confidence_head=True,
    confidence_with_markov=True,
)


@pytest.fixture(scope="module")
def models():
    target = make_target(target_config())
    drafter = make_drafter(DRAFTER, target)
    target.to(torch.bfloat16)
    target.rope_table = target.rope_table.float()
    return target, drafter.to(torch.bfloat16)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, models) -> Path:
    target, drafter = models
    path = tmp_path_factory.mktemp("build") / "model"
    path.mkdir()
    weights = {n: t for n, t in target.state_dict().items() if n != "lm_head.weight"}
    write_hf_model(path, target.config, weights)
    (path / "drafter").mkdir()
    write_drafter(path / "drafter", DRAFTER, dict(drafter.state_dict()))
    return path


@pytest.mark.parametrize(
    "options,workers,beside",
    [
        (BuildOptions(), 2, True),
        (BuildOptions(), 1, False),
        (BuildOptions("tensorrt", ()), 2, False),
        (None, 2, False),
    ],
)
def test_engines_are_built_side_by_side_only_where_nothing_is_timed(options, workers, beside):
    limits = make_limits(None)
    job = BuildJob(None, Path("e"), limits, options=options, workers=workers)
    assert builds_beside(job) == beside


def rtx():
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra rtx")
    pytest.importorskip("onnxscript", reason="needs the extra rtx")


def test_a_two_layer_target_builds_with_every_profile_of_the_default_ladder(models, tmp_path):
    rtx()
    buckets = BucketConfig()
    limits = make_limits(
        models[1],
        rungs=build_ladder(buckets, 7),
        request_buckets=request_buckets(buckets),
        max_seq_len=128,
    )
    path = export_target(models[0], tmp_path / "target.onnx", (-1, 0), page_size=PAGE_SIZE)
    phases = []
    plan = build_engine(
        path,
        target_profiles(limits),
        (2, limits.num_pages),
        BuildOptions(compute_capabilities=("8.9",)),
        progress=lambda phase, done, total: phases.append((phase, done, total)),
    )
    assert len(limits.rungs) == 27 and len(plan) > 100_000
    assert any(done == total > 0 for _, done, total in phases)


def test_a_two_layer_drafter_builds_with_every_requests_bucket(models, tmp_path):
    rtx()
    buckets = BucketConfig()
    limits = make_limits(
        models[1],
        rungs=build_ladder(buckets, 7),
        request_buckets=request_buckets(buckets),
        max_seq_len=128,
    )
    path = export_drafter(models[1], tmp_path / "drafter.onnx", page_size=PAGE_SIZE)
    profiles = drafter_profiles(limits, 2 * HIDDEN)
    options = BuildOptions(compute_capabilities=("8.9",))
    assert len(profiles) == 6
    assert len(build_engine(path, profiles, (2, limits.num_pages), options)) > 100_000


COMMON = [
    "--max_batch_size=1",
    "--max_num_tokens=8",
    "--max_seq_len=64",
    "--ratios=1.0",
    "--tokens_per_block=8",
]


def test_dspark_build_makes_a_whole_engine_directory(model_dir, tmp_path, capsys):
    rtx()
    output = tmp_path / "engine"
    arguments = ["--model-dir", str(model_dir), "--output-dir", str(output), *COMMON]
    assert main([*arguments, "--output_timing_cache", str(tmp_path / "timing.cache")]) == 0
    loaded = load_engine_dir(output, verify=True)
    assert loaded.facts.compute_capabilities == ("8.9",)
    assert loaded.facts.limits.rungs == (1, 8) and loaded.facts.drafter == DRAFTER
    assert loaded.build_config["max_draft_len"] == 7
    assert loaded.pretrained_config["num_hidden_layers"] == 2
    assert (output / "rank0.engine").stat().st_size > 50_000
    assert (output / "drafter.engine").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]
    assert "model.cache" not in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        main(arguments)


def test_a_dry_run_prints_the_table_and_writes_nothing(model_dir, tmp_path, capsys):
    output = tmp_path / "engine"
    arguments = ["--model_dir", str(model_dir), "--output_dir", str(output), "--dry_run"]
    assert main([*arguments, "--max_seq_len=256"]) == 0
    text = capsys.readouterr().out
    assert not output.exists()
    line = next(row for row in text.splitlines() if row.split()[:2] == ["4", "0.50"])
    assert line.split()[2:4] == ["18", "20"]
    assert "token_ids [20], page_table [16, ≤9], logits [20, V]" in line
    assert "K/V memory: " in text and "27 target profiles" in text
    assert "estimated engine sizes: target " in text and ", drafter " in text


TRTLLM_BUILD_FLAGS = """--checkpoint_dir --output_dir --model_config --max_batch_size
--max_input_len --max_seq_len --max_num_tokens --opt_num_tokens --max_draft_len
--speculative_decoding_mode --kv_cache_type --tokens_per_block --logits_dtype --strip_plan
--weight_streaming --workers --log_level --profiling_verbosity --input_timing_cache
--output_timing_cache --dry_run --model_cls_file --model_cls_name"""
OWN_FLAGS = """--model-dir --drafter-dir --ratios --request-buckets --backend --compute-capability
--separate-engines --num-pages --gpu-memory-gb --dtype"""


def test_every_flag_of_trtllm_build_is_known_by_its_name():
    known = set(build_parser()._option_string_actions)
    assert set(TRTLLM_BUILD_FLAGS.split()) <= known
    assert {flag.replace("_", "-") for flag in known} <= known
    assert set(OWN_FLAGS.split()) <= known


def test_a_checkpoint_builds_with_one_target_file_per_rung(checkpoint_dir, tmp_path):
    rtx()
    output = tmp_path / "engine"
    arguments = ["--checkpoint_dir", str(checkpoint_dir), "--output_dir", str(output), *COMMON]
    assert main([*arguments, "--separate-engines"]) == 0
    loaded = load_engine_dir(output, verify=True)
    files = ["rank0.rung1.engine", "rank0.rung8.engine"]
    assert loaded.facts.target_files() == files
    assert sorted(p.name for p in output.glob("*.engine")) == ["drafter.engine", *files]


@pytest.fixture(scope="module")
def checkpoint_dir(model_dir, tmp_path_factory) -> Path:
    """The same model as a TensorRT-LLM checkpoint of two ranks."""
    output = tmp_path_factory.mktemp("build") / "checkpoint"
    return convert_to_trtllm(model_dir, output, tp_size=2, drafter_dir=model_dir / "drafter")


@pytest.mark.parametrize("named", ["auto", "none", "other"])
def test_a_torch_directory_of_a_checkpoint_holds_the_drafter_that_was_asked_for(
    checkpoint_dir, model_dir, tmp_path, named
):
    target, other = load_model_config(model_dir), tmp_path / "other"
    config, weights = load_drafter(model_dir / "drafter", target)
    write_drafter(other, config, {name: tensor + 1 for name, tensor in weights.items()})
    expected = {"auto": model_dir / "drafter", "none": None, "other": other}[named]
    output = tmp_path / "engine"
    arguments = ["--checkpoint_dir", str(checkpoint_dir), "--output_dir", str(output), *COMMON]
    asked = str(other) if named == "other" else named
    assert main([*arguments, "--backend", "torch", "--drafter-dir", asked]) == 0
    held = output / "model" / "drafter"
    if expected is None:
        assert not held.exists()
        return
    (_, found), (_, wanted) = (load_drafter(path, target) for path in (held, expected))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_gguf_file_is_converted_and_built_in_one_step(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    output = tmp_path / "engine"
    arguments = ["--model-dir", str(tmp_path / "m.gguf"), "--output-dir", str(output), *COMMON]
    assert main([*arguments, "--backend", "torch"]) == 0
    loaded = load_engine_dir(output, verify=True)
    assert loaded.pretrained_config["num_hidden_layers"] == tiny_gguf.config().num_layers
    assert load_model_config(output / "model").vocab_size == tiny_gguf.config().vocab_size
    assert (output / "tokenizer.json").is_file()


def test_a_torch_directory_holds_the_model_itself(model_dir, tmp_path):
    output = tmp_path / "engine"
    arguments = ["--model_dir", str(model_dir), "--output_dir", str(output), "--backend", "torch"]
    assert main([*arguments, *COMMON]) == 0
    loaded = load_engine_dir(output, verify=True)
    assert loaded.facts.backend == "torch" and loaded.facts.target_files() == []
    assert (output / "model" / "drafter" / "config.json").is_file()


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--max_draft_len", "5"], "max_draft_len = 5"),
        (["--kv_cache_type", "continuous"], "kv_cache_type = 'continuous'"),
        (["--compute_capability", "9.0"], "compute_capability = '9.0'"),
        (["--max_batch_size", "32"], "max_num_tokens = 8"),
        (["--gpu_memory_gb", "0.0001"], "gpu_memory_gb = 0.0001 .*lower num_pages"),
        (["--model_config", "c.json"], "model_config = 'c.json' .*left out"),
        (["--strip_plan"], "strip_plan = True .*left out: .*refit"),
        (["--weight-streaming"], "weight_streaming = True .*left out"),
        (["--workers", "0"], "workers = 0"),
        (["--backend", "torch", "--separate-engines"], "separate_engines = True"),
        (["--drafter-dir", "nowhere"], "drafter_dir = 'nowhere' is not a directory"),
        (["--backend", "torch", "--compute-capability", "8.9"], "compute_capability = "),
    ],
)
def test_impossible_combinations_are_refused_before_anything_is_built(
    model_dir, tmp_path, flags, message
):
    output = tmp_path / "engine"
    with pytest.raises(ConfigError, match=message):
        main(["--model_dir", str(model_dir), "--output_dir", str(output), *COMMON, *flags])
    assert not list(tmp_path.iterdir())


def test_one_of_model_and_checkpoint_directory_must_be_named(model_dir):
    with pytest.raises(ConfigError, match="exactly one of the two"):
        main(["--dry_run"])


def test_a_node_that_cannot_be_built_is_named(tmp_path):
    rtx()
    import onnx
    from onnx import TensorProto, helper

    node = helper.make_node("no_such_op", ["x"], ["y"], name="layer_7/oddity", domain="dspark")
    shape = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph([node], "g", shape[:1], shape[1:])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("dspark", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports), str(tmp_path / "bad.onnx"))
    with pytest.raises(EngineError, match=r"no_such_op|layer_7/oddity"):
        build_engine(tmp_path / "bad.onnx", [], (0, 2), BuildOptions())


def test_a_layer_whose_shapes_do_not_fit_is_named(tmp_path):
    rtx()
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="layer_7/fold")
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    shape = numpy_helper.from_array(np.array([7], np.int64), "shape")
    graph = helper.make_graph([node], "g", infos[:1], infos[1:], [shape])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "g")
    profile = Profile("p", {"x": Range((2, 3), (3, 3), (4, 3))})
    with pytest.raises(EngineError, match=r"building g failed: .*layer_7/fold"):
        build_engine(tmp_path / "g", [profile], (0, 2), BuildOptions())


def test_a_missing_backend_says_what_to_install(monkeypatch):
    import sys

    from trtllm_dspark.engines.build_tensorrt import import_backend

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineError, match="tensorrt"):
        import_backend("tensorrt")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.6", "8.9", "12.0"])
def test_the_whole_demo_model_builds(smollm2_dir, tmp_path, capability):
    rtx()
    output = tmp_path / "engine"
    arguments = ["--model-dir", str(smollm2_dir), "--output-dir", str(output)]
    assert main([*arguments, "--compute-capability", capability]) == 0
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["files"]["rank0.engine"]["bytes"] > 200_000_000
    load_engine_dir(output)
