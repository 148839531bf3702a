"""The rules of stories, and how varied texts are.

A text that breaks a rule is said to be below the floor: no judge is asked about it in training.
"""

import math
import re
from collections import Counter

SPECIAL_TOKEN = re.compile(
    r"</?s>|<\|[^|<>\s]{1,40}\|>|<(?:pad|unk|eos|bos|end_of_turn|start_of_turn)>|\[/?INST\]"
)
PREAMBLE = re.compile(
    r"\W*(?:sure\b|certainly\b|of course[,!]|here(?:['’]s| is) (?:a|the|your|my)\b|as an ai\b"
    r"|i (?:cannot|can['’]t) (?:write|help)"
    r"|(?:story|title|continuation|opening line|answer|rating|grade)\s*:)",
    re.IGNORECASE,
)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’]\w+)*", text.lower())


def n_grams(words: list[str], n: int) -> list[tuple[str, ...]]:
    starts = range(len(words) - n + 1)
    return [tuple(words[start : start + n]) for start in starts]


def distinct_n(texts: list[str], n: int) -> float:
    """Return the share of distinct word n-grams among all word n-grams of some texts.

    This is distinct-n of arXiv:1510.03055. It is NaN where there are no n-grams.
    """
    grams = []
    for text in texts:
        grams += n_grams(words_of(text), n)
    return len(set(grams)) / len(grams) if grams else math.nan


def broken_rule(prompt: str, story: str, min_words: int) -> str | None:
    """Return the name of the rule that puts a text below the floor; None for a text above it.

    The docstring of CreativeWritingEvaluator lists the rules.
    """
    words = words_of(story)
    if len(words) < min_words:
        return "empty"
    if SPECIAL_TOKEN.search(story) or PREAMBLE.match(story) or has_more_marks_than_letters(story):
        return "no continuation"
    if copies_prompt(words, words_of(prompt)):
        return "copied prompt"
    if repeats_phrases(words) or repeats_a_sentence(story):
        return "loop"
    return None


def has_more_marks_than_letters(story: str) -> bool:
    num_letters = sum(character.isalpha() for character in story)
    num_spaces = sum(character.isspace() for character in story)
    num_marks = len(story) - num_letters - num_spaces
    return num_marks > num_letters


def copies_prompt(words: list[str], prompt_words: list[str]) -> bool:
    grams = n_grams(words, 4)
    prompt_grams = set(n_grams(prompt_words, 4))
    num_copied = sum(gram in prompt_grams for gram in grams)
    return num_copied > 0.3 * len(grams)


def repeats_phrases(words: list[str]) -> bool:
    grams = n_grams(words, 3)
    return len(set(grams)) < 0.6 * len(grams)


def repeats_a_sentence(story: str) -> bool:
    """Whether a sentence of at least three words occurs at least three times."""
    sentences = [tuple(words_of(sentence)) for sentence in re.split(r"[.!?\n]+", story)]
    counts = Counter(sentence for sentence in sentences if len(sentence) >= 3)
    return any(count >= 3 for count in counts.values())
