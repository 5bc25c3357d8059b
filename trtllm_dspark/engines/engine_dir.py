# SPDX-License-Identifier: Apache-2.0
"""The engine directory (TensorRT-LLM's layout, extended): what is in it, written and read.

`config.json` {version, pretrained_config, build_config, dspark}, `rank0.engine`, `drafter.engine`,
`manifest.json` with sizes, digests and fingerprint. Knows files, not how engines are built or run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark._version import __version__
from trtllm_dspark.checkpoints.staging import sha256_of, write_json
from trtllm_dspark.config import BucketConfig, DrafterConfig, from_json_dict, load_json
from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.errors import ConfigError, EngineError

CONFIG, MANIFEST = "config.json", "manifest.json"
TARGET_ENGINE, DRAFTER_ENGINE = "rank0.engine", "drafter.engine"
MODEL_DIR = "model"
"""Backend torch only: the model directory, drafter included, that the torch engine loads."""
MEASURED = ("calibration.json", "latency_table.json")
"""Not in the manifest: they may be measured again in a finished directory."""
FORMAT_VERSION = 1


@dataclass(frozen=True)
class EngineFacts:
    """`dspark` of an engine directory's config.json: all that running it needs to know."""

    backend: str
    dtype: str
    limits: EngineLimits
    ratios: tuple[float, ...] = BucketConfig.ratios
    """Of the bucket grid that the rungs were made from."""
    tap_layers: tuple[int, ...] = ()
    tap_width: int = 0
    drafter: DrafterConfig | None = None
    compute_capabilities: tuple[str, ...] = ()
    backend_version: str = ""
    gpu_name: str = ""
    """Full TensorRT only: the GPU that the engines were built on and are locked to."""
    plugins: bool = False
    """Whether the nodes of the domain are plugins (in place, lengths read on the device)."""
    separate_engines: bool = False
    """One target file per rung, `rank0.rung<N>.engine`, instead of one with all profiles."""
    checkpoint_hash: str = ""
    drafter_hash: str = ""

    def target_files(self) -> list[str]:
        """File names of the target's engines, in the order of the rungs."""
        if self.backend == "torch":
            return []
        if not self.separate_engines:
            return [TARGET_ENGINE]
        return [f"rank0.rung{rung}.engine" for rung in self.limits.rungs]

    def drafter_files(self) -> list[str]:
        """File name of the drafter's engine, if there is one."""
        return [DRAFTER_ENGINE] if self.drafter is not None and self.backend != "torch" else []

    @property
    def fingerprint(self) -> str:
        """Digest of everything that makes engine files interchangeable or not."""
        facts = {"version": __version__, **dataclasses.asdict(self)}
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class EngineDirectory:
    """An engine directory as read from disk."""

    path: Path
    facts: EngineFacts
    pretrained_config: dict[str, Any]
    build_config: dict[str, Any]
    fingerprint: str


def write_config(
    directory: Path,
    facts: EngineFacts,
    pretrained_config: dict[str, Any],
    build_config: dict[str, Any],
) -> None:
    """Write config.json; the engines lie beside it already or follow."""
    write_json(
        directory / CONFIG,
        {
            "version": __version__,
            "pretrained_config": pretrained_config,
            "build_config": build_config,
            "dspark": {"format": FORMAT_VERSION, **_plain(facts)},
        },
    )


def write_manifest(directory: Path, facts: EngineFacts) -> None:
    """List files with size and sha256; written last, so that it says the rest is whole."""
    names = sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file())
    files = {
        str(name): {
            "bytes": (directory / name).stat().st_size,
            "sha256": sha256_of(directory / name),
        }
        for name in names
        if str(name) not in (MANIFEST, *MEASURED)
    }
    manifest = {"format": FORMAT_VERSION, "fingerprint": facts.fingerprint, "files": files}
    write_json(directory / MANIFEST, manifest)


def load_engine_dir(path: str | Path, *, verify: bool = False) -> EngineDirectory:
    """Read an engine directory and check it against its manifest (digests too with `verify`)."""
    directory = Path(path)
    config = load_json(directory / CONFIG)
    dspark = config.get("dspark")
    if not isinstance(dspark, dict):
        raise ConfigError(
            f"{directory / CONFIG} has no 'dspark' section: it is an engine directory of another "
            "tool; build one with `dspark build`"
        )
    found = dspark.pop("format", None)
    if found != FORMAT_VERSION:
        raise ConfigError(
            f"{directory / CONFIG}: dspark.format = {found!r} is not allowed: this version reads "
            f"{FORMAT_VERSION}; build the engines again"
        )
    facts = from_json_dict(EngineFacts, dspark, f"{directory / CONFIG}: dspark")
    manifest = load_json(directory / MANIFEST)
    if manifest.get("fingerprint") != facts.fingerprint:
        raise EngineError(
            f"{directory / MANIFEST}: fingerprint {manifest.get('fingerprint')!r} is not that of "
            f"{CONFIG} ({facts.fingerprint}): files of two builds are mixed, or another version of "
            "this package built them; build again"
        )
    files = manifest.get("files") or {}
    check_files(directory, files, [*facts.target_files(), *facts.drafter_files()], verify)
    return EngineDirectory(
        directory,
        facts,
        config.get("pretrained_config") or {},
        config.get("build_config") or {},
        facts.fingerprint,
    )


def check_files(
    directory: Path, files: dict[str, dict[str, Any]], required: Sequence[str], verify: bool
) -> None:
    """Compare the files on disk with the manifest's entries."""
    missing = [name for name in required if name not in files]
    if missing:
        raise EngineError(f"{directory / MANIFEST} does not list {missing}: build again")
    for name, entry in files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            raise EngineError(
                f"{path}: found {'no file' if size is None else f'{size} bytes'}, the manifest "
                f"says {entry['bytes']} bytes: the directory is incomplete, build or copy it again"
            )
        if verify and sha256_of(path) != entry["sha256"]:
            raise EngineError(f"{path}: its sha256 is not the manifest's: copy it again")


def _plain(facts: EngineFacts) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(facts)))
    return data
