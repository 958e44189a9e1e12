import pytest

from facetrain.errors import DataError
from facetrain.verify.sets.csv_columns import read_columns

MANY = 20_000
"""Rows: more than are read at once."""


def test_columns_have_all_rows_in_order_without_outer_spaces(tmp_path):
    names, sides = ([f"p{row}" for row in range(MANY)], [str(row % 2) for row in range(MANY)])
    rows = "".join(f"{name}, {side}\n" for name, side in zip(names, sides, strict=True))
    (tmp_path / "table.csv").write_text("\ufeff name , side\n\n" + rows)
    assert read_columns(tmp_path / "table.csv").columns == {"name": names, "side": sides}


def test_equal_texts_are_one_object_also_after_many_different_ones(tmp_path):
    texts = ["group", *(f"p{row}" for row in range(MANY)), "group"]
    (tmp_path / "table.csv").write_text("\n".join(["name", *texts]))
    column = read_columns(tmp_path / "table.csv").columns["name"]
    assert column == texts and column[0] is column[-1]


def test_an_empty_line_of_a_single_column_is_an_empty_value_except_at_the_end(tmp_path):
    path = tmp_path / "table.csv"
    twice = 'group\r\r\n""\r\r\nf\r\r\n""\r\r\nm\r\r\n'  # by a program that opens it as text on Windows
    for text in ("group\n\nf\n\nm\n\n\n", 'group\r\n""\r\nf\r\n\r\n"m"\r\n', twice):
        path.write_text(text, newline="")
        assert read_columns(path).columns == {"group": ["", "f", "", "m"]}


def test_the_line_of_a_row_counts_empty_lines_and_line_ends_in_quotes(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text('a,b\n\n1,"x\ny"\n\n?,z\n')
    table = read_columns(path)
    assert [table.place(row) for row in (0, 1)] == [f"{path}, line 3", f"{path}, line 6"]
    with pytest.raises(DataError, match=r"table\.csv, line 6: a is '\?', not a finite number"):
        table.take_numbers("a")


@pytest.mark.parametrize("row", [2, MANY])
def test_a_row_of_another_length_is_refused_with_its_line(tmp_path, row):
    path = tmp_path / "table.csv"
    lines = ["a,b"] + ["1,2"] * MANY
    lines[row - 1] = "1"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"table\.csv, line {row}: 1 .*\b2\b"):
        read_columns(path)


def test_a_byte_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"a,b\n" + b"1,2\n" * MANY + "é,2\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"table\.csv: .* not text in UTF-8 \(byte 0xe9\); save it as UTF-8$"):
        read_columns(path)


def test_columns_without_a_name_are_left_out(tmp_path):
    (tmp_path / "table.csv").write_text(",a,b,,\n0,1,2,,\n1,3,4,,5\n")
    assert read_columns(tmp_path / "table.csv").columns == {"a": ["1", "3"], "b": ["2", "4"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b, a\n1,2,3\n", r"has two columns with the name a; rename one"),
        (" ,\n1,2\n", "no column has a name in the first line"),
        ("\n\n", "the file is empty"),
        ("," * 5000, "has 5,001 columns; the limit is 1,000$"),
        ('a,b\n"' + "x" * 200_000, "line 2: field larger than field limit"),
        ('a,b\n\n1,"Ann\n2,Bob\n3,Cy\n', "line 3: unexpected end of data; close every quote"),
        ('a,b\n1,"Ann\n2,Bob\n3,"Cy\n', "line 2: ',' expected after '\"'; close every quote"),
        (
            'a,b\n1,"Ann" \n',
            "line 2: ',' expected after '\"'; close every quote right before a comma or the line end",
        ),
    ],
)
def test_a_table_without_distinct_names_or_the_end_of_a_quote_is_refused(tmp_path, text, message):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(DataError, match=rf"table\.csv: .*{message}"):
        read_columns(tmp_path / "table.csv")
