# SPDX-License-Identifier: Apache-2.0
"""Timing caches: read, handed from engine to engine, kept; and who has none.

The builder's configuration is a double whose calls are checked against the real bindings.
"""

from __future__ import annotations

import argparse

import pytest

from tests.unit.engines.recording_double import Recorder
from trtllm_dspark import build_command
from trtllm_dspark.engines import build
from trtllm_dspark.engines.build_tensorrt import BuildOptions
from trtllm_dspark.engines.build_timing import TimingCache

TENSORRT = BuildOptions("tensorrt", ())


class Builder:
    """A configuration that accepts caches beginning with b'T' and adds an entry per build."""

    def __init__(self) -> None:
        trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra rtx")
        self._cache_class, self.given = trt.ITimingCache, []
        answers = {"create_timing_cache": self._create, "set_timing_cache": self._set}
        self.config = Recorder(trt.IBuilderConfig, answers, [])

    def _create(self, data):
        cache = Recorder(self._cache_class, {"serialize": (data or b"T") + b"+"}, [])
        cache.__dict__["data"] = data
        return cache

    def _set(self, cache, ignore_mismatch):
        assert ignore_mismatch is False
        accepted = cache.data[:1] in (b"", b"T")
        if accepted:
            self.given.append(cache.data)
        return accepted


def build_with(timing: TimingCache) -> list[bytes]:
    builder = Builder()
    timing.attach(builder.config)
    timing.keep()
    return builder.given


def test_what_one_engine_measured_the_next_one_reads_and_the_file_holds_both(tmp_path):
    path = tmp_path / "new" / "model.cache"
    timing = TimingCache(path, path)
    assert build_with(timing) == [b""]
    assert build_with(timing) == [b"T+"]
    assert path.read_bytes() == b"T++"
    assert [p.name for p in path.parent.iterdir()] == ["model.cache"]
    assert build_with(TimingCache(path, None)) == [b"T++"]
    assert path.read_bytes() == b"T++"


def test_a_cache_of_another_gpu_is_left_out_and_the_log_says_so(tmp_path, caplog):
    (tmp_path / "old").write_bytes(b"X")
    timing = TimingCache(tmp_path / "old", tmp_path / "new")
    assert build_with(timing) == [b""]
    assert "another GPU" in caplog.text and str(tmp_path / "old") in caplog.text
    assert (tmp_path / "new").read_bytes() == b"T+"


def named(backend: str, source: str | None = None, output: str | None = None):
    return argparse.Namespace(
        backend=backend, input_timing_cache=source, output_timing_cache=output
    )


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "torch"])
def test_backends_without_a_timing_cache_say_that_a_named_one_is_neither_read_nor_written(backend):
    options = None if backend == "torch" else BuildOptions()
    arguments = named(backend, output="model.cache")
    (note,) = build_command.timing_notes(arguments)
    assert f"'model.cache' is neither read nor written with backend {backend}: " in note
    assert build_command.timing_cache(arguments, options) is None
    assert build_command.timing_notes(named(backend)) == []


def test_tensorrt_keeps_one_cache_per_gpu_and_version_unless_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        build, "import_backend", lambda name: argparse.Namespace(__version__="11.4")
    )
    monkeypatch.setattr(build, "built_for", lambda options: (("8.9",), "NVIDIA L4"))
    timing = build_command.timing_cache(named("tensorrt"), TENSORRT)
    build_with(timing)
    kept = tmp_path / "timing" / "11.4-sm_89-NVIDIA_L4.cache"
    assert kept.read_bytes() == b"T+"
    assert build_with(build_command.timing_cache(named("tensorrt"), TENSORRT)) == [b"T+"]
    output = tmp_path / "mine"
    arguments = named("tensorrt", str(kept), str(output))
    assert build_with(build_command.timing_cache(arguments, TENSORRT)) == [b"T++"]
    assert kept.read_bytes() == b"T++" and output.read_bytes() == b"T+++"
    assert build_command.timing_notes(arguments) == []
