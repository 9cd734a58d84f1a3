"""The breaks of tests/breaks.py can be made, in every room; what notices them is run by hand."""

from pathlib import Path

from tests import breaks
from tests.breaks import BREAKS, ROOT, Break
from tests.test_layers import ROOMS

# rooms in which there is nothing to get wrong that would not stop everything
PLAIN = {"listener", "__main__"}


def test_each_break_can_be_made_and_names_tests_that_are_there() -> None:
    assert {one.name: breaks.fault(one) for one in BREAKS if breaks.fault(one)} == {}
    assert [one.name for one in BREAKS if one.old == one.new] == []
    files = {test.partition("::")[0] for one in BREAKS for test in one.tests}
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []


def test_breaks_are_in_every_room_and_none_stands_twice() -> None:
    assert {one.room for one in BREAKS} == set(ROOMS) - PLAIN
    assert len({one.name for one in BREAKS}) == len(BREAKS) >= 30


def test_break_that_is_seen_is_told_from_one_that_is_not(monkeypatch) -> None:
    """And from one whose text is gone; the working tree stays as it is."""
    one: Break = BREAKS[0]
    original = (ROOT / breaks.PACKAGE / one.file).read_text()

    def tested(given: Break, source: Path) -> tuple[int, str]:
        text = (source / "penstock" / given.file).read_text()
        assert text == original.replace(given.old, given.new) != original
        return (
            (1, "FAILED tests/test_x.py::test_y[a b] - AssertionError") if given is one else (0, "")
        )

    monkeypatch.setattr(breaks, "_tested", tested)
    others = one._replace(new=f"{one.old}  # the same"), one._replace(old="no such line")
    found = [breaks.broken(each) for each in (one, *others)]
    assert [each.noticed_by for each in found] == ["tests/test_x.py::test_y[a b]", "", ""]
    assert [each.problem for each in found[1:]] == [
        "PASSED UNSEEN",
        f"its text stands 0 times in {one.file}, not once",
    ]
    assert (ROOT / breaks.PACKAGE / one.file).read_text() == original
