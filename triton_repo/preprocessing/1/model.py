# SPDX-License-Identifier: Apache-2.0
"""The `preprocessing` model of the repository; all of it lives in trtllm_dspark.serving."""

from trtllm_dspark.serving.preprocessing_model import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
