"""Layer-wise streaming is real: what the workers' own events say of one long prompt."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.integration.runtime.model import read_spec
from tests.serve_process import ServeProcess, demo_model_folder

pytestmark = pytest.mark.model

SIZE = 16
CHUNK = 128
OUTBOX_BYTES = 1 << 20
PROMPT = "The history of the town begins with a bridge, a mill and a quarrel. " * 30

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def traces() -> Iterator[tuple[Events, Events, int, str, str]]:
    """Events of prefill and decode, the prompt's tokens, and what two servers said."""
    flags = ("--chunk-tokens", str(CHUNK), "--block-tokens", str(SIZE))
    with ServeProcess(*flags, "--outbox-bytes", str(OUTBOX_BYTES)) as server:
        answer = server.complete(PROMPT, max_tokens=16)
        server.wait_idle()
        tokens = answer["usage"]["prompt_tokens"]
        small = answer["choices"][0]["text"]
        prefill, decode = server.events("prefill"), server.events("decode")
        again = server.complete(PROMPT, max_tokens=16)["choices"][0]["text"]
    yield prefill, decode, tokens, small, again


def of(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def test_each_layer_leaves_before_two_more_are_computed(
    traces: tuple[Events, Events, int, str, str],
) -> None:
    prefill = traces[0]
    computed = {(e["chunk"], e["layer"]): e["at_ns"] for e in of(prefill, "LayerComputed")}
    announced: dict[tuple[int, int], int] = {}
    for event in of(prefill, "SliceAnnounced"):
        announced.setdefault((event["chunk"], event["layer"]), event["at_ns"])
    chunks = {chunk for chunk, _ in computed}
    layers = {layer for _, layer in computed}
    assert len(chunks) > 2
    assert len(layers) > 10
    first = min(chunks)
    late = [
        (first, layer)
        for layer in range(len(layers) - 2)
        if announced[first, layer] >= computed[first, layer + 2]
    ]
    assert not late, "layers whose first slice left only after layer k+2 had ended"


def test_no_layer_is_read_before_its_arrival(traces: tuple[Events, Events, int, str, str]) -> None:
    _, decode, tokens, _, _ = traces
    arrived: dict[int, int] = {}
    begun: dict[int, int] = {}
    read: dict[int, int] = {}
    for event in decode:  # in the order in which they were written
        if event["event"] == "SliceArrived":
            arrived[event["layer"]] = arrived.get(event["layer"], 0) + event["blocks"]
        elif event["event"] == "LayerReadBegun":
            begun[event["layer"]] = begun.get(event["layer"], 0) + event["blocks"]
            assert begun[event["layer"]] <= arrived[event["layer"]]
        elif event["event"] == "LayerRead":
            read[event["layer"]] = read.get(event["layer"], 0) + event["blocks"]
    blocks = -(-tokens // SIZE)
    assert read == begun == arrived
    assert set(read.values()) == {blocks}
    first_forward = next(e["at_ns"] for e in of(decode, "ForwardRan"))
    last_read = max(e["at_ns"] for e in of(decode, "LayerRead"))
    assert last_read < first_forward


def test_the_stream_begins_while_the_prompt_is_computed(
    traces: tuple[Events, Events, int, str, str],
) -> None:
    prefill, decode, _, _, _ = traces
    last_computed = max(e["at_ns"] for e in of(prefill, "LayerComputed"))
    read_before = [e for e in of(decode, "LayerRead") if e["at_ns"] < last_computed]
    assert len(read_before) > len(of(decode, "LayerRead")) / 2


def test_the_whole_prompt_is_never_staged(traces: tuple[Events, Events, int, str, str]) -> None:
    prefill, _, tokens, small, again = traces
    slices = sum(e["blocks"] for e in of(prefill, "SliceAnnounced"))
    layers = len({e["layer"] for e in of(prefill, "SliceAnnounced")})
    assert slices == layers * -(-tokens // SIZE), "each slice travels once"
    peak = max(e["staged_bytes"] for e in of(prefill, "SliceAnnounced"))
    slice_bytes = read_spec(demo_model_folder()).layout(SIZE).layer_bytes
    assert 0 < peak <= OUTBOX_BYTES
    assert peak < slices * slice_bytes / 4
    assert small == again, "computed and loaded prompts differ"
