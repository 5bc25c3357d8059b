# SPDX-License-Identifier: Apache-2.0
"""The one version source."""

__version__ = "0.1.0"
