# SPDX-License-Identifier: Apache-2.0
"""Twenty prompts for the demonstration model: mathematics, code, chat, and text that repeats."""

PROMPTS = (
    "What is the capital of France?",
    "Count from one to ten, one number per line.",
    "Write a Python function that returns the factorial of n.",
    "Repeat the word banana five times.",
    "A baker makes 24 rolls and sells them in bags of 6. How many bags are there?",
    "List the days of the week, then list them again in reverse order.",
    "Explain why the sky is blue in two sentences.",
    "Write a Python class with three methods: add, subtract and multiply.",
    "Translate into French: good morning, my friend.",
    "Solve 3x + 5 = 20 and show each step.",
    "Give me a recipe for pancakes.",
    "Write an email to my manager asking for a day off.",
    "What are the first five prime numbers?",
    "Tell me a short story about a dragon and a knight.",
    "Write SQL that creates a table of users with id, name and email.",
    "Name three advantages of public transport.",
    "If a train travels 60 km in 45 minutes, what is its speed in km/h?",
    "Copy this line twice: the quick brown fox jumps over the lazy dog.",
    "Write unit tests for a function is_even(n).",
    "Who wrote Hamlet, and when?",
)
