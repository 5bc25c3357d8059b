#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build an engine directory with trtllm-build's flag names; the same as `dspark build`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.cli import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
