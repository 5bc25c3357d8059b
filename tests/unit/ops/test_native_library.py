# SPDX-License-Identifier: Apache-2.0
"""When the native kernels run, and what happens where they cannot."""

import pytest
import torch

from trtllm_dspark.ops import native_library


def test_kernels_that_do_not_compile_leave_the_work_to_torch_and_the_log_says_why(
    monkeypatch, tmp_path, caplog
):
    (tmp_path / "broken.c").write_text("int ragged_attention(void) { return 0 }")
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native_library, "SOURCE_DIR", tmp_path)
    assert native_library.library.__wrapped__() is None
    assert "did not compile" in caplog.text or "no C compiler" in caplog.text
    monkeypatch.setenv("DSPARK_NATIVE", "0")
    caplog.clear()
    assert native_library.library.__wrapped__() is None
    assert not caplog.text


def test_a_changed_header_is_another_library(monkeypatch, tmp_path):
    for name in ("a.c", "b.h"):
        (tmp_path / name).write_text("int x;")
    monkeypatch.setattr(native_library, "SOURCE_DIR", tmp_path)
    monkeypatch.setattr(
        native_library.subprocess, "run", lambda *a, **k: type("R", (), {"stdout": ""})
    )
    before = native_library._key("cc")
    (tmp_path / "b.h").write_text("int y;")
    assert native_library._key("cc") != before


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_what_is_differentiated_traced_or_of_another_type_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(native_library, "library", lambda: object())
    x = torch.zeros(4)
    assert native_library.takes(x, x)
    assert not native_library.takes(x, x.bfloat16())
    assert not native_library.takes(x.half())
    weight = torch.nn.Parameter(torch.ones(4))
    assert not native_library.takes(x, weight)
    with torch.no_grad():
        assert native_library.takes(x, weight)
    assert not native_library.takes(torch.zeros(4, device="meta"))

    seen = []

    def traced(y):
        seen.append(native_library.takes(y))
        return y + 1

    torch.jit.trace(traced, x, check_trace=False)
    assert seen == [False]
