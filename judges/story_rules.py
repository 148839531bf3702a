"""The rules of stories: what falls below the floor, and how varied texts are."""

import math
import re
from collections import Counter

SPECIAL = re.compile(
    r"</?s>|<\|[^|<>\s]{1,40}\|>|<(?:pad|unk|eos|bos|end_of_turn|start_of_turn)>|\[/?INST\]"
)
PREAMBLE = re.compile(
    r"\W*(?:sure\b|certainly\b|of course[,!]|here(?:['’]s| is) (?:a|the|your|my)\b|as an ai\b"
    r"|i (?:cannot|can['’]t) (?:write|help)|(?:story|title|continuation|opening line|answer|rating|grade)\s*:)",
    re.IGNORECASE,
)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’]\w+)*", text.lower())


def n_grams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def distinct_n(texts: list[str], n: int) -> float:
    """Distinct word n-grams over all word n-grams of some texts (arXiv:1510.03055); NaN without any."""
    grams = [gram for text in texts for gram in n_grams(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def broken_rule(prompt: str, story: str, min_words: int) -> str | None:
    """The rule that puts a text below the floor; None if it is above it. CreativeWritingEvaluator names the rules."""
    words, prompt_grams = words_of(story), set(n_grams(words_of(prompt), 4))
    letters, marks = (
        sum(c.isalpha() for c in story),
        sum(not c.isalpha() and not c.isspace() for c in story),
    )
    four, three = n_grams(words, 4), n_grams(words, 3)
    sentences = Counter(tuple(words_of(sentence)) for sentence in re.split(r"[.!?\n]+", story))
    if len(words) < min_words:
        return "empty"
    if SPECIAL.search(story) or PREAMBLE.match(story) or letters < marks:
        return "no continuation"
    if sum(gram in prompt_grams for gram in four) > 0.3 * len(four):
        return "copied prompt"
    if len(set(three)) < 0.6 * len(three) or any(
        n > 2 and len(sentence) > 2 for sentence, n in sentences.items()
    ):
        return "loop"
    return None
