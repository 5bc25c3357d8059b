# SPDX-License-Identifier: Apache-2.0
"""The `postprocessing` model of the repository; all of it lives in trtllm_dspark.serving."""

from trtllm_dspark.serving.postprocessing_model import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
