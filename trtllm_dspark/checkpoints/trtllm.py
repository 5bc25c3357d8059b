# SPDX-License-Identifier: Apache-2.0
"""Writes and reads TensorRT-LLM checkpoints: config.json, rank{N}.safetensors, and a drafter.

The drafter lies in the subdirectory `drafter` in the unified format, where TensorRT-LLM's own
tools do not look. Conversion in both directions keeps every bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from trtllm_dspark.checkpoints.drafter_reader import load_drafter
from trtllm_dspark.checkpoints.drafter_writer import convert_drafter, write_drafter
from trtllm_dspark.checkpoints.hf_config import load_model_config, read_eos_ids
from trtllm_dspark.checkpoints.hf_reader import load_target_weights
from trtllm_dspark.checkpoints.hf_writer import write_hf_model
from trtllm_dspark.checkpoints.packaged import DRAFTER_SUBDIR
from trtllm_dspark.checkpoints.staging import staged_directory, write_json, write_tensors
from trtllm_dspark.checkpoints.target_tensors import EMBEDDING, target_shapes
from trtllm_dspark.checkpoints.tensor_check import SafetensorsDirectory, check_tensors
from trtllm_dspark.checkpoints.trtllm_config import (
    model_config_of_trtllm,
    tensor_parallel_size,
    trtllm_config_of,
)
from trtllm_dspark.checkpoints.trtllm_sharding import (
    Cut,
    Entry,
    check_tp_size,
    cut_tensor,
    join_tensors,
    trtllm_entries,
)
from trtllm_dspark.config import ModelConfig, load_json
from trtllm_dspark.errors import CheckpointError, ConfigError

COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
DRAFTER_COMPANIONS = ("calibration.json",)
"""Of a drafter, besides its configuration and tensors."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_trtllm_checkpoint(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    tp_size: int = 1,
    dtype: str = "auto",
    use_parallel_embedding: bool = False,
) -> None:
    """Write config.json and rank0..rank{tp_size−1}.safetensors into `directory`.

    `weights` are in the unified names. `dtype` 'auto' keeps the stored one and refuses a mixture;
    a named one rounds every tensor to it.
    """
    check_tp_size(config, tp_size)
    if config.attention_bias and config.architecture == "qwen3":
        raise CheckpointError("TensorRT-LLM's Qwen3 has no attention bias, this model has")
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(found, target_shapes(config), str(directory))
    name = _resolve_dtype(weights) if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise CheckpointError(f"dtype {name!r} is not allowed: auto or one of {sorted(_DTYPES)}")
    data = trtllm_config_of(
        config, dtype=name, tp_size=tp_size, use_parallel_embedding=use_parallel_embedding
    )
    write_json(directory / "config.json", data)
    entries = trtllm_entries(config, _embedding_cut(data))
    for rank in range(tp_size):
        shards = {
            entry.name: cut_tensor(
                _source(weights, entry).to(_DTYPES[name]), entry.cut, config, tp_size, rank
            ).clone()
            for entry in entries
        }
        write_tensors(directory / f"rank{rank}.safetensors", shards)


def load_trtllm_checkpoint(
    checkpoint_dir: str | Path,
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a TensorRT-LLM checkpoint of any tp_size: (config, unified name → whole tensor)."""
    directory = Path(checkpoint_dir)
    data = load_json(directory / "config.json")
    try:
        config = model_config_of_trtllm(data, read_eos_ids(directory, {}))
        tp_size = tensor_parallel_size(data)
        check_tp_size(config, tp_size)
        embedding_cut = _embedding_cut(data)
    except KeyError as error:
        raise CheckpointError(f"{directory}/config.json: key {error} is missing") from error
    except ConfigError as error:
        raise CheckpointError(f"{directory}/config.json: {error}") from error
    entries = trtllm_entries(config, embedding_cut)
    ranks = [_read_rank(directory, rank, config, entries, tp_size) for rank in range(tp_size)]
    whole = {
        entry.name: join_tensors(
            [rank[entry.name] for rank in ranks], entry.cut, config, f"{directory}: {entry.name}"
        )
        for entry in entries
        if entry.name in ranks[0]
    }
    return config, _unify(whole, entries, directory)


def convert_to_trtllm(
    model_dir: str | Path,
    output_dir: str | Path,
    *,
    tp_size: int = 1,
    dtype: str = "auto",
    use_parallel_embedding: bool = False,
    drafter_dir: str | Path | None = None,
    label_shift: bool | None = None,
) -> Path:
    """Convert a Hugging Face directory (and a drafter of any layout) to a TensorRT-LLM checkpoint.

    Tokenizer files and the drafter's calibration are copied along; `label_shift` is for a drafter
    whose config is ambiguous.
    """
    source, output = Path(model_dir), Path(output_dir)
    config = load_model_config(source)
    weights = load_target_weights(source, config)
    with staged_directory(output) as staged:
        write_trtllm_checkpoint(
            staged,
            config,
            weights,
            tp_size=tp_size,
            dtype=dtype,
            use_parallel_embedding=use_parallel_embedding,
        )
        _copy_companions(source, staged, config)
        if drafter_dir is not None:
            drafter = staged / DRAFTER_SUBDIR
            convert_drafter(drafter_dir, source, drafter, label_shift=label_shift)
            _copy_files(Path(drafter_dir), drafter, DRAFTER_COMPANIONS)
    return output


def convert_from_trtllm(checkpoint_dir: str | Path, output_dir: str | Path) -> Path:
    """Convert a TensorRT-LLM checkpoint back to a Hugging Face directory, drafter included."""
    source, output = Path(checkpoint_dir), Path(output_dir)
    config, weights = load_trtllm_checkpoint(source)
    with staged_directory(output) as staged:
        write_hf_model(staged, config, weights)
        _copy_companions(source, staged, config)
        own = source / DRAFTER_SUBDIR
        if own.is_dir():
            drafter = write_drafter(staged / DRAFTER_SUBDIR, *load_drafter(own, config))
            _copy_files(own, drafter, DRAFTER_COMPANIONS)
    return output


def _resolve_dtype(weights: Mapping[str, torch.Tensor]) -> str:
    names = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    if len(names) != 1:
        raise CheckpointError(
            f"the model mixes the dtypes {', '.join(names)}, a TensorRT-LLM checkpoint has one: "
            "choose it with dtype"
        )
    return names[0]


def _embedding_cut(data: Mapping[str, object]) -> Cut:
    if not data.get("use_parallel_embedding"):
        return Cut.COPY
    cuts = {0: Cut.VOCABULARY, 1: Cut.COLUMNS}
    dim = data.get("embedding_sharding_dim", 0)
    if dim not in cuts:
        raise CheckpointError(f"embedding_sharding_dim = {dim!r} is not allowed: it must be 0 or 1")
    return cuts[int(str(dim))]


def _source(weights: Mapping[str, torch.Tensor], entry: Entry) -> torch.Tensor:
    tensor = weights[entry.source]
    return tensor if entry.half is None else tensor.chunk(2)[entry.half]


def _read_rank(
    directory: Path, rank: int, config: ModelConfig, entries: list[Entry], tp_size: int
) -> dict[str, torch.Tensor]:
    shapes = target_shapes(config)
    expected = {}
    for entry in entries:
        whole = torch.empty(shapes[entry.source], device="meta")
        part = _source({entry.source: whole}, entry)
        expected[entry.name] = tuple(cut_tensor(part, entry.cut, config, tp_size, rank).shape)
    with SafetensorsDirectory(directory, f"rank{rank}") as files:
        found = files.shapes()
        if config.tie_word_embeddings and "lm_head.weight" not in found:
            del expected["lm_head.weight"]
        check_tensors(found, expected, f"{directory}/rank{rank}.safetensors")
        return {name: files.get(name) for name in found}


def _unify(
    whole: Mapping[str, torch.Tensor], entries: list[Entry], directory: Path
) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {}
    for entry in entries:
        if entry.name not in whole:
            continue
        tensor = whole[entry.name]
        if entry.name == "lm_head.weight" and entry.source == EMBEDDING:
            if not torch.equal(tensor, parts[EMBEDDING][0]):
                raise CheckpointError(
                    f"{directory}: tie_word_embeddings is true but lm_head.weight differs from "
                    "transformer.vocab_embedding.weight"
                )
            continue
        parts.setdefault(entry.source, []).append(tensor)
    return {
        name: group[0] if len(group) == 1 else torch.cat(group) for name, group in parts.items()
    }


def _copy_companions(source: Path, staged: Path, config: ModelConfig) -> None:
    _copy_files(source, staged, COMPANION_FILES)
    if config.eos_token_ids and not (staged / "generation_config.json").exists():
        eos = {"eos_token_id": list(config.eos_token_ids)}
        write_json(staged / "generation_config.json", eos)


def _copy_files(source: Path, output: Path, names: Sequence[str]) -> None:
    """Those of `names` that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copy2(source / name, output / name)
