# SPDX-License-Identifier: Apache-2.0
"""A built engine directory in a repository whose templates were filled by hand, as docs/deploy.md
tells: served with the limits it was built with, and answering like its model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.support import metrics, wait_until
from tests.e2e.tiny_model import write_tiny_drafter, write_tiny_model
from tests.unit.decoding.loops import generate, request
from trtllm_dspark import cli
from trtllm_dspark.config import SchedulerConfig, SystemConfig
from trtllm_dspark.runtime import build_system
from trtllm_dspark.serving.client import GrpcClient
from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import MODELS, template_dir

PROMPT = "abcabcabc"


def fill_repository(output: Path, engine_dir: Path) -> Path:
    """A copy of the templates, filled with the keys that docs/deploy.md names, and a policy."""
    shutil.copytree(
        template_dir(), output, ignore=shutil.ignore_patterns("__pycache__", "*.py[co]")
    )
    common = "triton_max_batch_size:3"
    logits, decoupled = "logits_datatype:TYPE_FP32", "decoupled_mode:true"
    tokenizer = f"tokenizer_dir:{engine_dir}"
    values = {
        "preprocessing": f"{tokenizer},preprocessing_instance_count:1",
        "postprocessing": f"{tokenizer},postprocessing_instance_count:1",
        "ensemble": logits,
        "tensorrt_llm_bls": f"{decoupled},{logits},bls_instance_count:1",
        "tensorrt_llm": f"engine_dir:{engine_dir},policy:fixed,profile:never,{decoupled},{logits},"
        "encoder_input_features_data_type:TYPE_FP16,prompt_embedding_table_data_type:TYPE_FP16,"
        "exclude_input_in_output:true",
    }
    for model in MODELS:
        path = str(output / model / "config.pbtxt")
        assert cli.main(["fill-template", "-i", path, f"{common},{values[model]}"]) == 0
    return output


def test_a_built_directory_is_served_from_filled_templates(tmp_path: Path) -> None:
    model, engine = write_tiny_model(tmp_path / "tiny"), tmp_path / "engine"
    write_tiny_drafter(model)
    limits = ["--max_batch_size", "3", "--max_num_tokens", "48", "--max_seq_len", "128"]
    paths = ["--model-dir", str(model), "--output-dir", str(engine)]
    assert cli.main(["build", *paths, "--backend", "torch", "--dtype", "float32", *limits]) == 0
    repository = fill_repository(tmp_path / "repository", engine)
    plain = SystemConfig(
        model_dir=str(model),
        dtype="float32",
        num_threads=1,
        max_seq_len=128,
        scheduler=SchedulerConfig(policy="autoregressive"),
        profile="never",
    )
    system = build_system(plain)
    (ids,) = generate(system.loop, [request(0, list(PROMPT.encode()), max_tokens=24)]).values()
    server = TritonServer(
        repository, ports=Ports(0, 0, 0), host="127.0.0.1", work_dir=tmp_path / "work"
    )
    with server, GrpcClient(server.grpc_url) as client:
        answer = client.ask({"text_input": PROMPT, "max_tokens": 24, "stream": True})
        assert answer.error is None and answer.finish_reason == "length"
        assert answer.text == system.tokenizer.decode(ids)
        wait_until(lambda: metrics(server).total("dspark_requests_total") == 1, "one counted")
        now = metrics(server)
        assert now.total("dspark_drafted_tokens_total") > 0
        assert now.total("dspark_pages") == 3 * 5  # of 128 tokens, a block and one more
        too_long = client.ask({"text_input": "x" * 128, "max_tokens": 8})
        assert "128" in (too_long.error or "")
