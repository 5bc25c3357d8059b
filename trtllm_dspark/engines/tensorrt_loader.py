# SPDX-License-Identifier: Apache-2.0
"""Puts a `TensorRTEngine` together from an engine directory, after checking version and GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.engines.build_profiles import Profile, drafter_profiles, target_profiles
from trtllm_dspark.engines.build_tensorrt import import_backend
from trtllm_dspark.engines.engine_dir import EngineDirectory, EngineFacts
from trtllm_dspark.engines.fingerprint import describe_device, fingerprint
from trtllm_dspark.engines.tensorrt_engine import TensorRTEngine
from trtllm_dspark.engines.tensorrt_engine_calls import EngineCalls
from trtllm_dspark.engines.tensorrt_engine_device import Device, open_device
from trtllm_dspark.engines.tensorrt_engine_session import EngineSession
from trtllm_dspark.engines.tensorrt_gpu import register_plugins
from trtllm_dspark.errors import EngineError
from trtllm_dspark.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What this machine has to run an engine with."""

    backend_version: str
    compute_capability: str
    """Like 8.9."""
    gpu_name: str = ""


def check_machine(facts: EngineFacts, machine: Machine) -> None:
    """Refuse engines of another backend version or another GPU, before they are read."""
    if facts.backend_version != machine.backend_version:
        raise EngineError(
            f"the engines were built with {facts.backend} {facts.backend_version}, this machine "
            f"has {machine.backend_version}: engines are locked to the version; install that one "
            "or build again"
        )
    built_for = facts.compute_capabilities
    if machine.compute_capability not in built_for:
        raise EngineError(
            f"the engines were built for compute capability {', '.join(built_for)}, this GPU "
            f"({machine.gpu_name}) has {machine.compute_capability}: build again with "
            f"--compute-capability {machine.compute_capability}"
        )
    if facts.gpu_name and facts.gpu_name != machine.gpu_name:
        raise EngineError(
            f"the engines were built on {facts.gpu_name!r} and this GPU is {machine.gpu_name!r}: "
            "TensorRT engines are locked to the GPU model; build again here"
        )


def describe_machine(trt: Any, device: Device) -> Machine:
    """The facts of the GPU behind a device."""
    major, minor = torch.cuda.get_device_capability(device.device)
    name = torch.cuda.get_device_name(device.device)
    return Machine(str(trt.__version__), f"{major}.{minor}", name)


def load_tensorrt_engine(
    directory: EngineDirectory,
    *,
    device_name: str = "cuda",
    use_drafter: bool = True,
    num_drafts: int | None = None,
) -> TensorRTEngine:
    """Deserialise the directory's engines and allocate their memory; fails in one sentence.

    `num_drafts`: γ of whatever drafts, by default the built-in drafter's.
    """
    facts = directory.facts
    device = open_device(device_name)
    trt = import_backend(facts.backend)
    check_machine(facts, describe_machine(trt, device))
    if facts.plugins:  # their creators live in the process-wide registry from now on
        register_plugins()
    logger.info("loading %s on %s", directory.path, device.device)
    return assemble_engine(directory, trt, device, use_drafter=use_drafter, num_drafts=num_drafts)


def assemble_engine(
    directory: EngineDirectory,
    trt: Any,
    device: Device,
    *,
    use_drafter: bool = True,
    num_drafts: int | None = None,
) -> TensorRTEngine:
    """The engine on an opened device; the machine has been checked."""
    facts, limits = directory.facts, directory.facts.limits
    target = _open_calls(
        trt, device, directory.path, facts.target_files(), target_profiles(limits), facts
    )
    drafter = None
    if use_drafter and facts.drafter is not None:
        profiles = drafter_profiles(limits, facts.tap_width)
        files = facts.drafter_files()
        drafter = _open_calls(trt, device, directory.path, files, profiles, facts)
    gamma = limits.num_drafts if num_drafts is None else num_drafts
    return TensorRTEngine(
        engine_info(directory, target, device, num_drafts=gamma),
        limits,
        device,
        target,
        drafter,
    )


def engine_info(
    directory: EngineDirectory, target: EngineCalls, device: Device, *, num_drafts: int
) -> EngineInfo:
    """What the loop must know; the fingerprint is of this directory on this machine."""
    facts, limits, name = directory.facts, directory.facts.limits, str(device.device)
    return EngineInfo(
        vocab_size=int(target.spec("logits").shape[1]),
        max_num_requests=limits.max_num_requests,
        max_seq_len=limits.max_seq_len,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        rungs=limits.rungs,
        num_drafts=num_drafts,
        fingerprint=fingerprint({"engine": facts.fingerprint, "num_drafts": num_drafts}, name),
        device=name,
        extra={"dtype": facts.dtype, "machine": describe_device(name), "backend": facts.backend},
    )


def _open_calls(
    trt: Any,
    device: Device,
    path: Path,
    files: Sequence[str],
    profiles: Sequence[Profile],
    facts: EngineFacts,
) -> EngineCalls:
    scratch: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> int:
        scratch.append(device.zeros((num_bytes,), torch.uint8))
        return scratch[-1].data_ptr()

    sessions = [EngineSession(trt, path / name, device.stream, allocate) for name in files]
    calls = EngineCalls(sessions, device, profiles, facts.limits.num_pages, scratch)
    if calls.in_place != facts.plugins:
        raise EngineError(
            f"{path}: config.json says plugins = {facts.plugins}, but the engine "
            f"{'updates' if calls.in_place else 'does not update'} pages in place: build again"
        )
    return calls
