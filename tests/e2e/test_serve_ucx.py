"""kvpool-serve --transport ucx: the real model's answers are exact, and no byte took another way."""

from collections.abc import Iterator

import pytest

from tests.e2e.exactness import Answer, Prompt, Reference, ask_all, check
from tests.e2e.test_serve_http import NAMES, SIZE, OverHttp, reference
from tests.serve_process import ServeProcess

pytestmark = [pytest.mark.model, pytest.mark.ucx]


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    flags = ("--transport", "ucx", "--chunk-tokens", "100", "--block-tokens", str(SIZE))
    with ServeProcess(*flags) as server:
        yield server


@pytest.fixture(scope="module")
def asked(served: ServeProcess) -> tuple[list[Prompt], dict[str, Answer]]:
    before = served.wait_idle()
    result = ask_all(OverHttp(served), reference()[0])
    after = served.wait_idle()
    assert (after.outbox_free, after.running) == (before.outbox_free, before.running)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_exact(asked: tuple[list[Prompt], dict[str, Answer]], name: str) -> None:
    tokenizer, model = reference()
    prompts, answers = asked
    prompt = next(prompt for prompt in prompts if prompt.name == name)
    assert check(Reference(model, tokenizer), [prompt], answers).differing == []


def test_prompts_that_begin_alike_are_loaded(
    asked: tuple[list[Prompt], dict[str, Answer]],
) -> None:
    prompts, answers = asked
    for prompt in prompts:
        if {"warm", "prefix extended", "prefix shared"} & set(prompt.kinds):
            assert answers[prompt.name].cached > SIZE, prompt.name


def test_there_is_no_socket_that_arenas_could_be_handed_over(served: ServeProcess) -> None:
    assert [path.name for path in served.run_dir.iterdir() if "transport" in path.name] == []
