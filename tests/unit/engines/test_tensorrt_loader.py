# SPDX-License-Identifier: Apache-2.0
"""Engine directories are checked against the machine before an engine is read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.engines.test_engine_dir import FACTS
from trtllm_dspark.engines.engine_dir import EngineDirectory
from trtllm_dspark.engines.tensorrt_engine_device import Device
from trtllm_dspark.engines.tensorrt_loader import Machine, check_machine, load_tensorrt_engine
from trtllm_dspark.errors import EngineError

MACHINE = Machine("1.7.1", "8.9", "A GPU")


def test_the_machine_that_was_built_for_is_accepted():
    check_machine(FACTS, MACHINE)
    check_machine(dataclasses.replace(FACTS, compute_capabilities=("8.6", "8.9")), MACHINE)
    check_machine(dataclasses.replace(FACTS, gpu_name="A GPU"), MACHINE)


@pytest.mark.parametrize(
    "facts,machine,message",
    [
        ({}, {"backend_version": "1.8.0"}, "tensorrt_rtx 1.7.1, this machine has 1.8.0"),
        ({}, {"compute_capability": "12.0"}, r"8.9, this GPU \(A GPU\) has 12.0: build again"),
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


def test_a_failing_cuda_call_is_named_with_cudas_word_for_it():
    cuda = pytest.importorskip("cuda.bindings.runtime", reason="needs the extra rtx")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a driver")
    with pytest.raises(EngineError, match="cudaSetDevice failed on cpu: cudaError"):
        Device(cuda, torch.device("cpu"), lambda: 0)
