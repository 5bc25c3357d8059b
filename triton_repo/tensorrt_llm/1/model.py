# SPDX-License-Identifier: Apache-2.0
"""The `tensorrt_llm` model of the repository; all of it lives in trtllm_dspark.serving."""

from trtllm_dspark.serving.engine_model import EngineModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
