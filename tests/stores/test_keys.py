"""Keys: refused, never repaired; made keys are legal and never collide."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stores import KeyRefused, check_key, file_key, result_key

LEGAL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}){0,31}")

names = st.text(max_size=200) | st.text(alphabet="abC0._-/x~ \n\udcff", max_size=200)


@pytest.mark.parametrize("key", ["a", "0009-bash-stdout", "a/b/c", "a..b", "-", "x" * 120, "/".join(["a"] * 32)])
def test_check_key_returns_the_key_itself(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "", ".", "..", "../s2/secret", "a/../b", "a//b", "/a", "a/", "a/./b", ".a", "a/.b", "a\\b", "a\0", "a\n", "a b",
        "a*b", "a?b", "[a]", "s3://bucket/x", "file:///etc/passwd", "a::b", "a%2e%2e", "é", "\u2024\u2024", "\udcff",
        "x" * 121, "/".join(["x" * 100] * 4), "/".join(["a"] * 33),
    ],
)  # fmt: skip
def test_check_key_refuses_what_is_no_key_a40_k53(key: str) -> None:
    with pytest.raises(KeyRefused):
        check_key(key)


@given(names)
def test_check_key_takes_exactly_the_alphabet(key: str) -> None:
    if LEGAL.fullmatch(key) and len(key) <= 400:
        assert check_key(key) == key
    else:
        with pytest.raises(KeyRefused):
            check_key(key)


def test_result_key_reads_as_what_it_is() -> None:
    assert result_key(9, "bash", "stdout") == "0009-bash-stdout"
    assert result_key(12345, "github__search", "content_2") == "12345-github__search-content_2"


@given(st.integers(0, 10**12), names, st.from_regex(r"[a-z0-9_]{1,32}", fullmatch=True))
def test_result_key_is_legal_whatever_the_tool(sequence: int, tool: str, stream: str) -> None:
    """seed-facts 12 row 18."""
    assert check_key(result_key(sequence, tool, stream))


@given(names, names)
def test_result_key_tells_tools_apart(one: str, other: str) -> None:
    assert (result_key(1, one, "stdout") == result_key(1, other, "stdout")) == (one == other)


def test_result_key_tells_a_squeezed_tool_from_one_of_that_name() -> None:
    squeezed = result_key(1, "a b", "stdout").removeprefix("0001-").removesuffix("-stdout")
    assert result_key(1, squeezed, "stdout") != result_key(1, "a b", "stdout")


@pytest.mark.parametrize(("sequence", "stream"), [(-1, "stdout"), (1, ""), (1, "a-b"), (1, "STDOUT"), (1, "a" * 33)])
def test_result_key_refuses_what_is_not_ours(sequence: int, stream: str) -> None:
    with pytest.raises(KeyRefused):
        result_key(sequence, "bash", stream)


@pytest.mark.parametrize("name", ["report.csv", "out/figures/a.png", "Makefile", "a..b"])
def test_file_key_leaves_a_legal_name(name: str) -> None:
    assert file_key(name) == name


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("sales 2025.csv", r"sales_2025\.x[0-9a-f]{20}\.csv"),
        (".bashrc", r"_bashrc\.x[0-9a-f]{20}"),
        ("a/.hidden/b.txt", r"a_hidden_b\.x[0-9a-f]{20}\.txt"),
        ("bad\udcff\n", r"bad_\.x[0-9a-f]{20}"),
        ("../../etc/passwd", r"_etc_passwd\.x[0-9a-f]{20}"),
        ("", r"_\.x[0-9a-f]{20}"),
        ("x" * 5000, r"x{60}\.x[0-9a-f]{20}"),
    ],
)
def test_file_key_makes_one_up_for_any_other_name(name: str, pattern: str) -> None:
    assert re.fullmatch(pattern, file_key(name))


@given(names)
def test_file_key_is_legal_whatever_the_name(name: str) -> None:
    assert check_key(file_key(name))


@given(names, names)
def test_file_key_tells_names_apart(one: str, other: str) -> None:
    assert (file_key(one) == file_key(other)) == (one == other)


@given(names)
def test_file_key_tells_a_name_from_the_key_made_for_it(name: str) -> None:
    made = file_key(name)
    assert made == name or file_key(made) != made
