"""Words of a Dockerfile, as Docker's reference says they are read."""

from __future__ import annotations

import pytest

from opendsec.build.words import WordError, expand, expand_document

VARIABLES = {"A": "one", "EMPTY": "", "PATH_LIKE": "/usr/local/lib/x.tar.gz", "B2": "two"}

CASES = [
    ("plain", "plain"),
    ("$A", "one"),
    ("${A}", "one"),
    ("$A$B2", "onetwo"),
    ("$AB", ""),
    ("${A}B", "oneB"),
    ("x$", "x$"),
    ("$1", "$1"),
    ("\\$A", "$A"),
    ("'$A'", "$A"),
    ('"$A"', "one"),
    ('"a \\"b\\" \\$A \\n"', 'a "b" $A \\n'),
    ("a\\ b", "a b"),
    ("'a'\"b\"c", "abc"),
    ("${NONE:-word}", "word"),
    ("${EMPTY:-word}", "word"),
    ("${EMPTY-word}", ""),
    ("${NONE-word}", "word"),
    ("${A:-word}", "one"),
    ("${A:+word}", "word"),
    ("${EMPTY:+word}", ""),
    ("${EMPTY+word}", "word"),
    ("${NONE+word}", ""),
    ("${NONE:-${A}}", "one"),
    ("${NONE:-'a b'}", "a b"),
    ("${A:?no}", "one"),
    ("${PATH_LIKE#*/}", "usr/local/lib/x.tar.gz"),
    ("${PATH_LIKE##*/}", "x.tar.gz"),
    ("${PATH_LIKE%.*}", "/usr/local/lib/x.tar"),
    ("${PATH_LIKE%%.*}", "/usr/local/lib/x"),
    ("${PATH_LIKE/l/L}", "/usr/Local/lib/x.tar.gz"),
    ("${PATH_LIKE//l/L}", "/usr/LocaL/Lib/x.tar.gz"),
    ("${A#nothing}", "one"),
]


@pytest.mark.parametrize(("word", "expected"), CASES)
def test_expansion(word: str, expected: str) -> None:
    assert expand(word, VARIABLES) == expected


@pytest.mark.parametrize("word", ["'open", '"open', "${A", "${", "${A:=x}", "${NONE:?not there}", "${NONE?}"])
def test_what_is_no_word(word: str) -> None:
    with pytest.raises(WordError):
        expand(word, VARIABLES)


def test_another_escape() -> None:
    assert expand("C:\\$A`$A", VARIABLES, escape="`") == "C:\\one$A"


def test_documents_keep_quotes() -> None:
    assert expand_document("'$A' \"${B2}\" \\n \\$A\n", VARIABLES) == "'one' \"two\" \\n \\$A\n"
