"""Text in columns."""

from __future__ import annotations

from parallax.launch.check.columns import WIDTH, in_columns, printable


def test_columns_are_as_wide_as_they_need_to_be() -> None:
    rows = [["a", "1", "x"], ["long name", "1000", ""]]
    assert in_columns(["name", "n", "end"], rows, right=["n"]) == (
        "name          n  end\na             1  x\nlong name  1000"
    )


def test_an_empty_column_is_left_out() -> None:
    assert in_columns(["a", "b", "c"], [["1", "", "3"], ["4", "", "6"]]) == "a  c\n1  3\n4  6"


def test_the_end_of_a_short_row_runs_over_the_columns_that_are_left() -> None:
    rows = [["1", "2", "3"], ["4", "a long text instead"]]
    assert in_columns(["a", "b", "c"], rows) == "a  b  c\n1  2  3\n4  a long text instead"
    assert in_columns(["a", "b", "c"], rows[1:]) == "a\n4  a long text instead"
    line = in_columns(["a", "b", "c"], [["4", "x" * 200]]).split("\n")[1]
    assert len(line) == WIDTH
    assert line.endswith("x…")


def test_what_does_not_fit_is_cut_where_it_was_told_to_be() -> None:
    rows = [["name-" + "x" * 50 + "-1", "GPU " + "y" * 60, "kept as it is"]]
    first, last = in_columns(["a", "b", "c"], rows, cut=["b"]).split("\n")
    assert last.startswith(f"{rows[0][0]}  GPU yyy")
    assert last.endswith("y…  kept as it is")
    assert len(last) == WIDTH
    assert first.startswith("a  ")


def test_a_name_keeps_both_its_ends() -> None:
    rows = [["start-" + "x" * 150 + "-end", "z" * 20]]
    line = in_columns(["a", "b"], rows).split("\n")[1]
    assert line.startswith("start-x")
    assert line.endswith(f"x-end  {'z' * 20}")
    assert len(line) == WIDTH


def test_more_columns_than_fit_are_cut_off() -> None:
    titles = [f"title-{i:02d}" for i in range(20)]
    lines = in_columns(titles, [["x" * 30] * 20]).split("\n")
    assert [len(line) for line in lines] == [WIDTH, WIDTH]
    assert lines[1].startswith("xxxx…xxx  xxxx…xxx  ")


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable(" a\x1b[31mb\r\n\tc\x00 ") == "a [31mb c"
    assert in_columns(["a"], [["x\x1by\nz"]]) == "a\nx y z"
