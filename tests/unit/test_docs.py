# SPDX-License-Identifier: Apache-2.0
"""What the documents promise by name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtllm_dspark.cli import COMMANDS
from trtllm_dspark.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8"))
    local = [t for t in targets if not t.startswith(("http://", "https://"))]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert not missing


def test_every_environment_variable_is_documented_with_its_default():
    text = (ROOT / "docs" / "cpu.md").read_text("utf-8")
    for variable in VARIABLES.values():
        row = next((line for line in text.splitlines() if f"`{variable.name}`" in line), "")
        assert f"`{variable.default}`" in row, variable.name


def test_the_readme_lists_every_command():
    listed = re.findall(r"^\| `dspark ([a-z-]+)` \|", PAGES[0].read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_page_on_engines_lists_every_build_script():
    text = (ROOT / "docs" / "engines.md").read_text("utf-8")
    scripts = [path.name for path in (ROOT / "build_scripts").glob("*.py")]
    assert [name for name in scripts if f"`{name}`" not in text] == []
