# SPDX-License-Identifier: Apache-2.0
"""`dspark calibrate` end to end on a tiny model: what it writes, what it keeps of an older file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.unit.evaluation.tiny_system import (
    GAMMA,
    write_model,
    write_prompts,
    write_random_drafter,
)
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation import calibrate_command
from trtllm_dspark.evaluation.calibrate_command import keep_modes
from trtllm_dspark.scheduling.calibration import Calibration, ModeCalibration
from trtllm_dspark.types import DraftMode

GREEDY, HOT = DraftMode.GREEDY_TARGET, DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS


def test_a_mode_joins_those_of_the_same_drafter_and_replaces_those_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = write_model(tmp_path / "tiny")
    path, sglang, trtllm = (tmp_path / f"{name}.json" for name in ("own", "sglang", "trtllm"))
    fixed = ["--model-dir", str(model_dir), "--prompts", *write_prompts(tmp_path)]
    fixed += ["--slice", "0:1", "--max-new-tokens", "28", "--dtype", "float32", "--threads", "1"]
    fixed += ["--output", str(path)]

    exports = ["--sglang", str(sglang), "--tensorrt-llm", str(trtllm)]
    assert calibrate_command.main([*fixed, "--modes", GREEDY.value, *exports]) == 0
    first = Calibration.load(path)
    assert set(first.modes) == {GREEDY} and first.num_drafts == GAMMA
    temperatures = list(first.modes[GREEDY].temperatures)
    assert json.loads(sglang.read_text())["temperatures"] == pytest.approx(temperatures)
    assert json.loads(trtllm.read_text()) == {"sts_temperatures": temperatures}

    greedy = json.loads(path.read_text())["modes"][GREEDY.value]
    assert calibrate_command.main([*fixed, "--modes", HOT.value]) == 0
    second = json.loads(path.read_text())["modes"]
    assert set(second) == {GREEDY.value, HOT.value} and second[GREEDY.value] == greedy

    other = write_random_drafter(tmp_path / "other", model_dir, seed=1)
    with caplog.at_level(logging.WARNING):
        command = [*fixed, "--modes", HOT.value, "--drafter", str(other)]
        assert calibrate_command.main(command) == 0
    assert set(Calibration.load(path).modes) == {HOT}
    assert f"{path} does not say that it is of this drafter" in caplog.text


@pytest.mark.parametrize("flag", ["--sglang", "--tensorrt-llm"])
def test_a_form_of_the_greedy_mode_is_refused_where_that_is_not_fitted(flag: str) -> None:
    command = ["--model-dir", "none", "--prompts", "none", "--modes", HOT.value, flag, "x.json"]
    with pytest.raises(ConfigError, match=f"{flag} would write.*add greedy_target to --modes"):
        calibrate_command.main(command)


@pytest.mark.parametrize(
    ("num_drafts", "provenance", "is_kept"),
    [
        (2, {"drafter": "d", "fingerprint": "another machine"}, True),
        (2, {"drafter": "e", "fingerprint": "f"}, False),
        (2, {"fingerprint": "f"}, True),
        (2, {"fingerprint": "g"}, False),
        (2, {}, False),
        (3, {"drafter": "d", "fingerprint": "f"}, False),
    ],
)
def test_a_file_is_known_by_its_drafter_else_by_its_engine(
    num_drafts: int, provenance: dict[str, str], is_kept: bool
) -> None:
    old, new = ModeCalibration((2.0,) * num_drafts, 500), ModeCalibration((3.0, 3.0), 500)
    earlier = Calibration(num_drafts, {GREEDY: old, HOT: old}, provenance)
    fitted = Calibration(2, {HOT: new}, {"drafter": "d", "fingerprint": "f"})
    found = keep_modes(fitted, earlier, Path("calibration.json"))
    assert found.modes == ({GREEDY: old, HOT: new} if is_kept else {HOT: new})
    assert found.provenance == fitted.provenance
