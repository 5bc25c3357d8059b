# SPDX-License-Identifier: Apache-2.0
"""The error tree. Every message says what failed, the value found, what was allowed, what to do.

`ValueError` family: the caller's fault. `RuntimeError` family: the machine's fault. Only the
command line turns these into exit codes, only `serving` turns them into Triton status codes.
"""

from __future__ import annotations


class DSparkError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(DSparkError, ValueError):
    """A configuration that cannot work: the command line exits with code 2."""


class CheckpointError(ConfigError):
    """A checkpoint whose configuration or tensors are missing, misshaped or ambiguous."""


class InvalidRequestError(DSparkError, ValueError):
    """A request that can never be served as it stands (Triton: INVALID_ARG)."""


class UnsupportedError(InvalidRequestError):
    """A request for a feature that is refused by name (Triton: INVALID_ARG)."""


class QueueFullError(DSparkError, RuntimeError):
    """The waiting queue is at `max_queue_size` (Triton: UNAVAILABLE)."""


class ShuttingDownError(DSparkError, RuntimeError):
    """The server is draining and takes no new requests (Triton: UNAVAILABLE)."""


class RequestTimeoutError(DSparkError, RuntimeError):
    """A request ran into its own time-out (Triton: UNAVAILABLE)."""


class RequestCancelledError(DSparkError, RuntimeError):
    """A request was cancelled by its client or by a stop request (Triton: CANCELLED)."""


class EngineError(DSparkError, RuntimeError):
    """An engine could not be built, loaded or run on this machine."""


class ServerError(DSparkError, RuntimeError):
    """The inference server could not be found, started or reached."""
