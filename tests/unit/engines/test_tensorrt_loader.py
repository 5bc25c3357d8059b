# SPDX-License-Identifier: Apache-2.0
"""Engine directories are checked against the machine before an engine is read."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from tests.unit.engines.test_engine_dir import FACTS
from trtllm_dspark.engines.engine_dir import EngineDirectory
from trtllm_dspark.engines.tensorrt_engine_device import Device
from trtllm_dspark.engines.tensorrt_gpu import Gpu, describe_gpu, find_gpu, num_gpus
from trtllm_dspark.engines.tensorrt_loader import Machine, check_machine, load_tensorrt_engine
from trtllm_dspark.errors import EngineError

MACHINE = Machine("1.7.1", Gpu("A GPU", "8.9"))


def test_the_machine_that_was_built_for_is_accepted():
    check_machine(FACTS, MACHINE)
    check_machine(dataclasses.replace(FACTS, compute_capabilities=("8.6", "8.9")), MACHINE)
    check_machine(dataclasses.replace(FACTS, gpu_name="A GPU"), MACHINE)


@pytest.mark.parametrize(
    "facts,machine,message",
    [
        ({}, {"backend_version": "1.8.0"}, "tensorrt_rtx 1.7.1, this machine has 1.8.0"),
        ({}, {"gpu": Gpu("A GPU", "12.0")}, r"8.9, this GPU \(A GPU\) has 12.0: build again"),
        ({"gpu_name": "Another"}, {}, "built on 'Another' and this GPU is 'A GPU'"),
    ],
)
def test_another_version_or_gpu_is_refused_with_both_values_and_what_to_do(facts, machine, message):
    with pytest.raises(EngineError, match=message):
        check_machine(dataclasses.replace(FACTS, **facts), dataclasses.replace(MACHINE, **machine))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_one_sentence_says_what_is_missing_and_what_to_do(tmp_path):
    directory = EngineDirectory(tmp_path, FACTS, {}, {}, FACTS.fingerprint)
    with pytest.raises(EngineError) as error:
        load_tensorrt_engine(directory)
    message = str(error.value)
    assert "needs an NVIDIA GPU" in message and "--backend torch" in message
    assert "\n" not in message


@pytest.fixture
def cuda():
    return pytest.importorskip("cuda.bindings.runtime", reason="needs the extra rtx")


def test_a_failing_cuda_call_is_named_with_cudas_word_for_it(cuda):
    if num_gpus(cuda):
        pytest.skip("needs a machine without a driver")
    with pytest.raises(EngineError, match="cudaSetDevice failed on cuda:1: cudaError"):
        Device(cuda, 1)


@pytest.mark.parametrize("name,index", [("cuda", 0), ("cuda:1", 1), ("cpu", 0)])
def test_a_device_name_says_which_gpu(name, index):
    assert find_gpu(name, 2) == index


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "tpu"])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(EngineError, match=rf"{name}.* 2 GPU\(s\): use cuda:0 to cuda:1"):
        find_gpu(name, 2)


def test_a_gpu_is_described_by_cudas_own_record(cuda):
    record = cuda.cudaDeviceProp()
    record.name, record.major, record.minor = b"A GPU".ljust(256, b"\0"), 8, 9
    success = cuda.cudaError_t.cudaSuccess
    double = types.SimpleNamespace(
        cudaError_t=cuda.cudaError_t, cudaGetDeviceProperties=lambda index: (success, record)
    )
    gpu = describe_gpu(double, 0)
    assert gpu == Gpu("A GPU", "8.9") and str(gpu) == "A GPU sm_89"


def test_memory_that_cannot_be_had_is_named_with_its_size_and_what_to_do(cuda):
    error = cuda.cudaError_t.cudaErrorMemoryAllocation
    answers = {
        "cudaMalloc": lambda size: (error, None),
        "cudaHostAlloc": lambda size, flags: (error, None),
    }
    double = types.SimpleNamespace(
        **{name: getattr(cuda, name) for name in ("cudaError_t", "cudaStreamNonBlocking")},
        cudaEventDisableTiming=cuda.cudaEventDisableTiming,
        cudaHostAllocDefault=cuda.cudaHostAllocDefault,
        cudaSetDevice=lambda index: (cuda.cudaError_t.cudaSuccess,),
        cudaStreamCreateWithFlags=lambda flags: (cuda.cudaError_t.cudaSuccess, 1),
        cudaEventCreateWithFlags=lambda flags: (cuda.cudaError_t.cudaSuccess, 2),
        **answers,
    )
    device = Device(double)
    with pytest.raises(EngineError, match=r"cudaErrorMemoryAllocation for 48 bytes.*--num-pages"):
        device.zeros((3, 4), "FLOAT")
    with pytest.raises(EngineError, match=r"cudaHostAlloc failed .* for 8 bytes"):
        device.host_zeros((1,), "INT64")
