#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the latency table of an engine on this machine; the same as `dspark profile`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
