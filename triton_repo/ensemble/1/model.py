# SPDX-License-Identifier: Apache-2.0
"""The `ensemble` model of the repository; all of it lives in trtllm_dspark.serving."""

from trtllm_dspark.serving.text_model import TextModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
