# SPDX-License-Identifier: Apache-2.0
"""Devices that are not there, or not devices, are refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from trtllm_dspark.config import SystemConfig
from trtllm_dspark.engines import device
from trtllm_dspark.engines.device import check_device
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.options import add_system_options, system_config
from trtllm_dspark.serving.model_parameters import ModelParameters, read_system_config


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_a_name_that_is_no_device_is_refused_by_the_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match="must be cpu, cuda or cuda:N"):
        SystemConfig(device=name)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_device_names_are_taken(name: str) -> None:
    assert SystemConfig(device=name).device == name


def test_cuda_without_a_device_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"finds no CUDA device: use --device cpu"):
        check_device("cuda")


def test_a_device_beyond_the_last_and_a_missing_compiler_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(ConfigError, match=r"has 2 CUDA device\(s\): use cuda:0 to cuda:1"):
        check_device("cuda:2")
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton"):
        check_device("cuda")


def test_the_command_line_and_the_template_name_the_device() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_system_options(parser)
    arguments = parser.parse_args(["--model-dir", "m", "--device", "cuda:1"])
    assert system_config(arguments).device == "cuda:1"
    parameters = {
        "gpt_model_path": {"string_value": "m"},
        "device": {"string_value": "cuda"},
        "dtype": {"string_value": "${dtype}"},
    }
    assert read_system_config(ModelParameters({"parameters": parameters})).device == "cuda"
