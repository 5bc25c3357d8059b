# SPDX-License-Identifier: Apache-2.0
"""Where training prompts come from: prompt files (re-worded and with other numbers), and user turns
that the target writes itself when given only their first words. Pure functions of an item number.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import ConfigError

TEMPLATES = {
    "math": (
        "{p}",
        "Solve this problem. {p}",
        "{p}\nShow your work.",
        "Can you help me with this? {p}",
        "{p}\nExplain each step, then give the answer.",
        "Question: {p}",
    ),
    "code": (
        "{p}",
        "Complete this task in Python.\n{p}",
        "{p}\nExplain how it works.",
        "Write clean code for the following.\n{p}",
        "{p}\nAdd a docstring and an example.",
    ),
    "chat": (
        "{p}",
        "{p} Keep it short.",
        "{p} Give as much detail as you can.",
        "Please answer: {p}",
    ),
}
STARTS = {
    "math": (
        "A train travels|A baker makes|If a farmer has|There are|John buys|Mary has|"
        "Solve the equation|What is the value of|Find the area of|Calculate the|"
        "How many ways|A store sells|Simplify|A rectangle has|The sum of|"
        "Compute the derivative|Lisa earns|A car uses|Let x be|Tom and Sam|"
        "What is the probability|Determine the number of|A box contains|Each student in|"
        "A recipe calls for|In a class of|Evaluate|Convert|The average of|If f(x) ="
    ),
    "code": (
        "Write a Python function|Write a function that|Create a class|Implement|"
        "Write a program|How do I sort|Given a list|def |Write a SQL query|Fix the bug in|"
        "Write a script|Explain this code|Write a JavaScript function|Complete the function|"
        "Write unit tests|Given a string|Return the|Write a recursive|Check if a number|"
        "Write a method to|Use regular expressions|Reverse a|Write a Python program to find|"
        "Convert a dictionary|How can I read a file"
    ),
    "chat": (
        "What is|Explain|How do I|Write a short story|Tell me about|Give me|Write an email|"
        "Summarize|Why do|Can you|List|Describe|What are the benefits|Compare|Write a poem|"
        "I need advice|Imagine|Suggest|How does|Who was|Translate|Help me|Create a plan|"
        "Pretend you are|Draft a|Rewrite|What should I|Write a blog post|Discuss|"
        "Is it true that|Define|Name|Write a product description|Give three tips|Provide|"
        "Compose|Edit the following|Write a dialogue|What happened|Design"
    ),
}

FORM = 'JSON lines such as {"id": "sums/1", "domain": "math", "prompt": "What is 1+1?"}'
"""What a prompt file looks like, for messages."""


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    prompt_id: str
    domain: str
    text: str


@dataclass(frozen=True)
class Item:
    """One sequence to generate: a finished user turn, or the start of one the target completes."""

    item_id: int
    user_text: str
    is_start: bool
    temperature: float
    seed: int


def read_prompts(paths: Sequence[str | Path], first: float, last: float) -> list[Prompt]:
    """The lines of each file from fraction `first` to `last` of it."""
    prompts: list[Prompt] = []
    for path in paths:
        lines = [(n, line) for n, line in enumerate(_read_lines(path), 1) if line.strip()]
        for number, line in lines[round(len(lines) * first) : round(len(lines) * last)]:
            prompts.append(_parse_prompt(line, f"{path}, line {number}"))
    if not prompts:
        raise ConfigError(f"no prompts in {[str(p) for p in paths]} between {first} and {last}")
    return prompts


def _read_lines(path: str | Path) -> list[str]:
    """Lines end at a line feed only: JSON strings may hold other separators (U+2028)."""
    try:
        return Path(path).read_text("utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; it must be {FORM}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}): it must be {FORM}") from error


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON ({error}): it must be {FORM}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} holds {type(row).__name__}: it must be {FORM}")
    for name in ("id", "domain", "prompt"):
        if not isinstance(row.get(name), str):
            raise ConfigError(f"{where}: {name} = {row.get(name)!r} is no text: it must be {FORM}")
    return Prompt(row["id"], row["domain"], row["prompt"])


def make_item(
    prompts: Sequence[Prompt],
    item_id: int,
    temperatures: Sequence[float],
    self_written: float,
    seed: int,
) -> Item:
    """Item number `item_id`: a function of its arguments alone, so that runs can be resumed."""
    rng = random.Random(f"{seed}:{item_id}")
    temperature = temperatures[item_id % len(temperatures)]
    token_seed = rng.getrandbits(63)
    if rng.random() < self_written:
        domain = rng.choice(sorted(STARTS))
        start = rng.choice(STARTS[domain].split("|"))
        return Item(item_id, start, True, temperature, token_seed)
    # A domain with many prompts comes more often, but only by the root of their number: a drafter
    # is judged by the mean over domains, and a short file must not be answered over and over.
    count = Counter(prompt.domain for prompt in prompts)
    (prompt,) = rng.choices(prompts, [count[prompt.domain] ** -0.5 for prompt in prompts])
    text = prompt.text
    if prompt.domain == "math" and rng.random() < 0.6:
        text = change_numbers(text, rng)
    template = rng.choice(TEMPLATES.get(prompt.domain, ("{p}",)))
    return Item(item_id, template.replace("{p}", text), False, temperature, token_seed)


def plain_item(prompts: Sequence[Prompt], item_id: int, temperature: float, seed: int) -> Item:
    """Prompt number `item_id` as it stands (validation)."""
    token_seed = random.Random(f"{seed}:{item_id}").getrandbits(63)
    return Item(item_id, prompts[item_id].text, False, temperature, token_seed)


def change_numbers(text: str, rng: random.Random) -> str:
    """Replace whole numbers above 1 by others of like size: a new problem in the same words."""

    def other(match: re.Match[str]) -> str:
        value = int(match.group())
        return match.group() if value < 2 else str(rng.randint(2, max(3, 2 * value)))

    return re.sub(r"(?<![\d.,\\^{])\d{1,4}(?![\d.,}])", other, text)
