"""What a page of a study says is compared with its tables, in its sentences too."""

import pytest

from experiments import pages

TABLES = {
    "ends a/new": [
        ("side", "mean", "tokens", "strict, each seed [95 %]"),
        ("new", "80.4", "1,234", "x"),
    ],
    "ends a/all": [("side", "mean"), ("new", "80.4"), ("base", "35.6")],
    "curve a/new": [("side", "0", "20"), ("new", "24.8, 24.8", "47.6, 50.2")],
    "change a/new": [("side", "entropy"), ("new", "0.31 -> 0.02, 0.35 -> 0.04")],
    "difference new base": [
        ("side", "mean [95 %]", "verdict"),
        ("new", "+5.3 [+1.2, +9.4]", "significant"),
    ],
    "difference base new": [
        ("side", "mean [95 %]", "verdict"),
        ("base", "-5.3 [-9.4, -1.2]", "significant"),
    ],
    "difference new old": [
        ("side", "mean [95 %]", "verdict"),
        ("new", "+0.5 [-1.5, +2.5]", "equal within 3 points"),
    ],
    "difference new seeds": [
        ("side", "mean [95 %]", "verdict"),
        ("new", "+0.5 [-9.5, +8.5]", "not significant (all seeds agree)"),
    ],
}


def rows_of(command):
    if command not in TABLES:
        raise ValueError(f"{command} is no table")
    return TABLES[command]


def wrong_with(sentence, tmp_path):
    """What `check` says of a page with this sentence, without the name of the page."""
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{sentence}\n", "utf-8")
    problems = pages.check([page], rows_of, tmp_path, write=False)
    return [problem.removeprefix("page.md: ") for problem in problems]


@pytest.mark.parametrize(
    "sentence",
    [
        "It ends at 80.4 %<!--ends a/new: mean-->.",
        "It ends at 80 %<!--ends a/new: mean-->, with 1,234 tokens<!--ends a/new: tokens-->.",
        "One ends at 35.6 %<!--ends a/all: base: mean-->.",
        "Between 47.6<!--curve a/new: 20 min--> and 50.2 %<!--curve a/new: 20 max-->.",
        "On average 48.9 %<!--curve a/new: 20 mean-->.",
        "From 0.33<!--change a/new: entropy before mean-->, in the mean.",
        "To 0.02<!--change a/new: entropy after min--> and more.",
        "It is 5.3 points higher<!--difference new base: mean-->.",
        "It is 5.3 points [1.2, 9.4]\nhigher<!--difference new\nbase: mean-->.",
        "It is 5.3 points [1.2, 9.4] lower<!--difference base new: mean-->.",
        "The difference is +5.3 points [+1.2, +9.4]<!--difference new base: mean-->.",
        "At least 1.2 points more<!--difference new base: mean low-->.",
        "The difference is significant<!--difference new base: verdict-->.",
        "The difference is not\nsignificant<!--difference new old: verdict-->.",
        "The difference is not significant<!--difference new seeds: verdict-->.",
        "They are equal within 3 points<!--difference new old: verdict-->.",
        "The flags `--beta 0.04`, 2e-4, tiny/1m and [a link](page1.5.md) need no source.",
        "They have 60 iterations of 8 x 8, and a 95 % interval.",
    ],
)
def test_a_sentence_that_says_what_its_source_says(sentence, tmp_path):
    assert wrong_with(sentence, tmp_path) == []


@pytest.mark.parametrize(
    ("sentence", "problem"),
    [
        ("It ends at 80.5 %<!--ends a/new: mean-->.", "80.5 % should be 80.4 %"),
        ("It ends at 81 %<!--ends a/new: mean-->.", "81 % should be 80 %"),
        ("With 1,243 tokens<!--ends a/new: tokens-->.", "1,243 tokens should be 1,234 tokens"),
        ("It ends at 80.4 %.", "80.4 has no source"),
        ("It gains 5 points.", "5 has no source"),
        ("- A list in a list:\n  - It ends\n    at 80.4 %.", "80.4 has no source"),
        ("It is **24.8** of them.", "24.8 has no source"),
        ("| by hand | 24.8 |", "24.8 has no source"),
        ("It ends at 35.6 %<!--ends a/all: mean-->.", "which of 80.4, 35.6?"),
        ("It ends at 35.6 %<!--ends a/all: old: mean-->.", "ends a/all has no row old"),
        ("It ends at 47 %<!--curve a/new: 30-->.", "has no column 30; it has side, 0, 20"),
        ("It ends at 47 %<!--curve a/new: 20 least-->.", "least does not say which number"),
        ("It ends at 47 %<!--curve a/old: 20-->.", "curve a/old is no table"),
        ("It ends at 47 %<!--something-->.", "a source is COMMAND: COLUMN"),
        ("It is 5.3 points lower<!--difference new base: mean-->.", "the difference is +5.3"),
        ("It is 5.3 points higher<!--difference base new: mean-->.", "the difference is -5.3"),
        ("It is -5.3 points<!--difference new base: mean-->.", "-5.3 points should be +5.3 points"),
        ("It is 5.3 points apart<!--difference new base: mean-->.", "which side is higher"),
        (
            "It is 5.3 points [1.2, 9.5] more<!--difference new base: mean-->.",
            "should be 5.3 points [1.2, 9.4]",
        ),
        (
            "It is 5.3 points more, which is significant<!--difference new base: verdict-->.",
            "5.3 has no source",
        ),
        ("It is significant, as it seems.", "significant has no source"),
        ("They are equal within 3\npoints.", "equal within 3 points has no source"),
        ("It is not significant<!--difference new base: verdict-->.", "the verdict is significant"),
        (
            "It is significant<!--difference new old: verdict-->.",
            "the verdict is equal within 3 points",
        ),
        (
            "It is significant<!--difference new seeds: verdict-->.",
            "the verdict is not significant",
        ),
        ("It is undecided<!--difference new base: verdict-->.", "the verdict is significant"),
    ],
)
def test_a_sentence_that_does_not(sentence, problem, tmp_path):
    (found,) = wrong_with(sentence, tmp_path)
    assert problem in found


def test_writing_puts_numbers_right_and_leaves_all_else(tmp_path):
    page = tmp_path / "page.md"
    text = "a\n\nIt ends at 7 %<!--ends a/new: mean-->, 1.0\npoints [+1.0, +2.0] "
    text += "more<!--difference new base:\nmean-->."
    page.write_text(text, "utf-8")
    assert pages.check([page], rows_of, tmp_path, write=True) == []
    expected = text.replace("7 %", "80 %").replace(
        "1.0\npoints [+1.0, +2.0]", "5.3\npoints [+1.2, +9.4]"
    )
    assert page.read_text("utf-8") == expected
    assert pages.check([page], rows_of, tmp_path, write=False) == []


def test_a_command_at_the_end_of_a_page_has_a_table_too(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n\n    python experiments/table.py ends a/all\n", "utf-8")
    (problem,) = pages.check([page], rows_of, tmp_path, write=False)
    assert "a table is not what the logs say" in problem
    assert pages.check([page], rows_of, tmp_path, write=True) == []
    assert page.read_text("utf-8").endswith(
        "ends a/all\n\n| side | mean |\n| --- | --- |\n| new | 80.4 |\n| base | 35.6 |\n"
    )
    assert pages.check([page], rows_of, tmp_path, write=False) == []


def test_a_number_of_others_stands_in_the_file_that_is_named(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "others.md").write_text("| 82.3 |", "utf-8")
    assert wrong_with("Others have 82.3<!--docs/others.md--> %.", tmp_path) == []
    (found,) = wrong_with("Others have 83.2<!--docs/others.md--> %.", tmp_path)
    assert "this is not in the file" in found


def test_a_number_of_a_table_needs_a_source_in_a_sentence(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("\n    python experiments/table.py ends a/new\n\n| x |\n\nIt has 80.4.\n")
    check = pages.check([page], rows_of, tmp_path, write=True)
    assert check == ["page.md: 80.4 has no source"]
    assert "| new | 80.4 | 1,234 | x |\n\nIt has" in page.read_text("utf-8")
