# SPDX-License-Identifier: Apache-2.0
"""Starts the real tritonserver on a model repository, waits until it is ready, and stops it.

The server never outlives this process: it gets SIGTERM when the process that started it dies.
Knows processes, ports and logs; nothing of models.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.errors import ServerError
from trtllm_dspark.serving.ports import Ports, choose_ports
from trtllm_dspark.serving.server_files import ServerFiles, lay_out_server

logger = logging.getLogger(__name__)

KILL_AFTER_S = 15.0
"""Patience beyond the server's own exit time-out before it is killed."""
MIN_SHARED_MEMORY_BYTES = 4 << 20
MAX_SHARED_MEMORY_BYTES = 256 << 20
SHARED_MEMORY_PARTS = 16
"""Model processes that the free shared memory is divided among, with room to spare."""
_PR_SET_PDEATHSIG = 1


class TritonServer:
    """A running tritonserver; start it from a thread that lives as long as the server shall."""

    def __init__(
        self,
        repository: Path,
        *,
        ports: Ports | None = None,
        host: str = "0.0.0.0",
        work_dir: Path | None = None,
        exit_timeout_s: int = 30,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        """Choose ports and lay out the server in `work_dir` (a temporary directory by default)."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if work_dir is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="dspark-server-")
            work_dir = Path(self._scratch.name)
        work_dir.mkdir(parents=True, exist_ok=True)
        self.host, self.exit_timeout_s = host, exit_timeout_s
        self.ports, self.port_notes = choose_ports(ports or Ports(), host)
        self.log_path = work_dir / "tritonserver.log"
        files = lay_out_server(work_dir)
        self._command = self._make_command(files, repository, extra_arguments)
        self._environment = make_environment(files)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client_host(self) -> str:
        """Where clients on this machine connect to."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def http_url(self) -> str:
        """host:port of the HTTP endpoint."""
        return f"{self.client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """host:port of the gRPC endpoint."""
        return f"{self.client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self.client_host}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process.pid

    def start(self, timeout_s: float = 300.0) -> TritonServer:
        """Start and wait until every model is ready; ServerError shows the end of the log."""
        parent = os.getpid()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        atexit.register(self.stop)
        try:
            self._wait_ready(timeout_s)
        except BaseException:
            self.stop(drain=False)
            raise
        return self

    def is_ready(self) -> bool:
        """Whether the server and all models answer that they are ready."""
        url = f"http://{self.http_url}/v2/health/ready"
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the server to end; its exit code, None after `timeout_s`."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, drain: bool = True) -> None:
        """End the server: running requests finish first (`drain`), leftovers are killed."""
        process = self._process
        if process is None:
            return
        atexit.unregister(self.stop)
        if process.poll() is None and drain:
            process.send_signal(signal.SIGTERM)
            self.wait(self.exit_timeout_s + KILL_AFTER_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None

    def close(self) -> None:
        """Stop and remove the temporary directory."""
        self.stop()
        if self._scratch is not None:
            self._scratch.cleanup()

    def log_tail(self, num_lines: int = 12) -> str:
        """Why models could not be loaded, as far as the log says it, and its last lines."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        causes = [line for line in lines if line.startswith("E") and "failed to load" in line]
        return "\n".join(line.split("\\n\\nAt:")[0] for line in causes + lines[-num_lines:])

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if self._process is not None and self._process.poll() is not None:
                raise ServerError(
                    f"tritonserver ended with code {self._process.returncode} before it was ready; "
                    f"the end of {self.log_path}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"tritonserver was not ready after {timeout_s:g} s; the end of "
                    f"{self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(0.1)

    def _make_command(
        self, files: ServerFiles, repository: Path, extra_arguments: Sequence[str]
    ) -> list[str]:
        return [
            str(files.binary),
            f"--model-repository={repository.resolve()}",
            f"--backend-directory={files.backend_dir.resolve()}",
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--metrics-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self.exit_timeout_s}",
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-default-byte-size={shared_memory_bytes()}",
            *extra_arguments,
        ]


def shared_memory_bytes(directory: str = "/dev/shm") -> int:
    """Shared memory of each model process, so large that it need not grow while requests run.

    The Python backend maps a region that grows elsewhere, under threads that still use it: the
    process, then the server, dies (seen with cancellations after a large request). Pages that are
    not touched cost nothing; a small /dev/shm gets less.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return MIN_SHARED_MEMORY_BYTES
    return max(MIN_SHARED_MEMORY_BYTES, min(MAX_SHARED_MEMORY_BYTES, free // SHARED_MEMORY_PARTS))


def make_environment(files: ServerFiles) -> dict[str, str]:
    """The server's environment: this one, with the laid-out Python first."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    environment["PATH"] = _prepend(files.python_bin_dir, environment.get("PATH"))
    environment["LD_LIBRARY_PATH"] = _prepend(
        files.libpython_dir, environment.get("LD_LIBRARY_PATH")
    )
    return environment


def _prepend(directory: Path, value: str | None) -> str:
    return f"{directory}{os.pathsep}{value}" if value else str(directory)


def _die_with(parent: int) -> None:
    """In the child: ask for SIGTERM when the starting thread ends, even by SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
