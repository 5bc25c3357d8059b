# SPDX-License-Identifier: Apache-2.0
"""Renders triton_repo/ for one system: a copy with every template filled.

Knows templates and configurations, not the server that will read them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.config import SystemConfig, to_json_dict
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.serving.template import fill_template, template_keys

MODELS = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")
CONFIG_FILE = "dspark_config.json"
STRUCTURAL_KEYS = (
    "triton_max_batch_size",
    "decoupled_mode",
    "logits_datatype",
    "encoder_input_features_data_type",
    "prompt_embedding_table_data_type",
    "preprocessing_instance_count",
    "postprocessing_instance_count",
    "bls_instance_count",
)
"""Keys outside strings: a config.pbtxt is no valid configuration before they are filled."""


@dataclass(frozen=True)
class RepositoryOptions:
    """How the models behave where a request says nothing, and how many processes there are."""

    apply_chat_template: bool = False
    exclude_input_in_output: bool = True
    decoupled: bool = True
    """False: unary requests only (gRPC ModelInfer, HTTP infer), no streaming."""
    skip_special_tokens: bool = True
    drain_timeout_s: int = 30
    num_preprocessing: int = 1
    num_postprocessing: int = 1
    num_bls: int = 1


def template_dir() -> Path:
    """Where the templates are: beside the package in a checkout, else inside the package."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package.parent / "triton_repo", package / "triton_repo"):
        if (candidate / "tensorrt_llm" / "config.pbtxt").is_file():
            return candidate
    raise ConfigError(
        f"triton_repo is neither in {package.parent} nor in {package}: install the package again"
    )


def render_repository(
    config: SystemConfig, output: Path, options: RepositoryOptions | None = None
) -> Path:
    """Write the repository for `config` to `output`, which must not exist, and return it."""
    options = options or RepositoryOptions()
    if output.exists():
        raise ConfigError(f"{output} exists: choose another directory for the model repository")
    config = dataclasses.replace(config, model_dir=str(Path(config.model_dir).resolve()))
    values = _values(config, options)
    for model in MODELS:
        source, target = template_dir() / model, output / model
        (target / "1").mkdir(parents=True)
        shutil.copyfile(source / "1" / "model.py", target / "1" / "model.py")
        text = (source / "config.pbtxt").read_text(encoding="utf-8")
        skipped = {"tokenizer_dir"} if model == "tensorrt_llm" else set()
        wanted = {k: values[k] for k in template_keys(text) if k in values and k not in skipped}
        text = fill_template(text, wanted, f"{model}/config.pbtxt")
        if not options.decoupled:
            text = text.replace("{ decoupled: true }", "{ decoupled: false }")
        (target / "config.pbtxt").write_text(text, encoding="utf-8")
    data = json.dumps(to_json_dict(config), indent=2) + "\n"
    (output / "tensorrt_llm" / CONFIG_FILE).write_text(data, encoding="utf-8")
    return output


def num_text_threads(config: SystemConfig) -> int:
    """Requests that one text model keeps in the engine at once: all that may run or wait there."""
    return min(max(32, config.buckets.max_num_requests + config.max_queue_size + 8), 512)


def _values(config: SystemConfig, options: RepositoryOptions) -> dict[str, str]:
    return {
        "triton_max_batch_size": str(config.buckets.max_num_requests),
        "decoupled_mode": _flag(options.decoupled),
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "prompt_embedding_table_data_type": "TYPE_FP16",
        "preprocessing_instance_count": str(options.num_preprocessing),
        "postprocessing_instance_count": str(options.num_postprocessing),
        "bls_instance_count": str(options.num_bls),
        "dspark_config": CONFIG_FILE,
        "tokenizer_dir": config.model_dir,
        "apply_chat_template": _flag(options.apply_chat_template),
        "exclude_input_in_output": _flag(options.exclude_input_in_output),
        "skip_special_tokens": _flag(options.skip_special_tokens),
        "max_queue_size": str(config.max_queue_size),
        "max_threads": str(num_text_threads(config)),
        "drain_timeout_s": str(options.drain_timeout_s),
    }


def _flag(value: bool) -> str:
    return "true" if value else "false"
