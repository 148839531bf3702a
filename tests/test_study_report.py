"""experiments/report.py: tables find their place, and the report's sentences are checked."""

import pytest

from experiments import report

TABLE = "| size | accuracy |\n| --- | --- |\n| 1m | 93.04 |"
CAPTION = "*The model learns. Lines are means of 3 seeds.*"


def page(abstract="", first="", second=""):
    """A report of two sections; the first of them has the table and the caption."""
    return (
        f"# Report\n\n## Abstract\n\n{abstract}\n\n## 1. First\n\n{TABLE}\n\n{CAPTION}\n\n{first}"
        f"\n\n## 2. Second\n\n{second}\n"
    )


@pytest.mark.parametrize(
    "sentence",
    [
        "It reaches 93.04%.",
        "It reaches 93%, by 93.0 points.",
        "The 1.5B model has 134.5 million parameters.",
        "It has `--beta 0.04` and $c = 0.2$, [as here](tables/0.5.md).",
        "    0.75 is in a block of code",
        "It has 20 seeds and 60 iterations.",
    ],
)
def test_numbers_of_a_table_and_settings_are_accepted(sentence):
    assert report.check_sentences(page(first=sentence), [TABLE, CAPTION]) == []


@pytest.mark.parametrize("sentence", ["It reaches 94%.", "It gains 12 points.", "At 0.35 nats."])
def test_a_number_without_a_table_is_a_fault(sentence):
    (fault,) = report.check_sentences(page(first=sentence), [TABLE, CAPTION])
    assert "1. First" in fault


def test_only_the_abstract_may_use_the_tables_of_other_sections():
    assert report.check_sentences(page(abstract="It reaches 93.0%."), [TABLE]) == []
    (fault,) = report.check_sentences(page(second="It reaches 93.0%."), [TABLE])
    assert "2. Second: 93.0" in fault


def test_a_table_that_is_not_from_the_logs_is_read_like_a_sentence():
    own_table = "| size | accuracy |\n| --- | --- |\n| 3m | 95.5% |"
    (fault,) = report.check_sentences(page(second=own_table), [TABLE])
    assert "95.5" in fault


def test_a_table_takes_the_place_of_the_one_with_its_header():
    new = TABLE.replace("93.04", "91.20") + "\n| 3m | 95.50 |"
    filled = report.fill(page(second="More."), new)
    assert new in filled
    assert "93.04" not in filled
    assert filled.endswith("More.\n")
    with pytest.raises(ValueError, match="0 times"):
        report.fill(page(), "| another | header |\n| --- | --- |")


@pytest.mark.slow
def test_the_pages_say_what_the_kept_logs_give(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out
