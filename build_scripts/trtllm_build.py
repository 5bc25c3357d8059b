#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The exact `trtllm-build` command of a stock target engine; the same as `dspark trtllm-build`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.cli import main

if __name__ == "__main__":
    sys.exit(main(["trtllm-build", *sys.argv[1:]]))
