"""The public interface changes on purpose only."""

import ast
import difflib

from tests.tidy import api


def test_the_interface_is_the_one_on_record() -> None:
    recorded, now = api.SNAPSHOT.read_text(), api.snapshot()
    changed = difflib.unified_diff(
        recorded.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=1
    )
    assert recorded == now, "if you meant it, run `make api`:\n" + "\n".join(changed)


def test_a_change_shows() -> None:
    before = "class Pool:\n    size: int\n    def load(self, a: int) -> int: ...\n"
    for after in (
        before.replace("a: int", "b: int"),
        before.replace("-> int", "-> str"),
        before.replace("size: int", "size: int = 1"),
        before.replace("class Pool:", "class Pool(Base):"),
        before.replace("load", "_load"),
    ):
        one = list(api.render("m", ast.parse(before)))
        assert one != list(api.render("m", ast.parse(after))), after


def test_private_names_and_bodies_do_not() -> None:
    one = ast.parse("def f(a):\n    return 1\n\ndef _g(): ...\n")
    other = ast.parse("def f(a):\n    '''Doc.'''\n    return 2\n\n_x = 1\n")
    assert list(api.render("m", one)) == list(api.render("m", other))
