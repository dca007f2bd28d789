import re
from pathlib import Path

import pytest

from kvpool.errors import UsageError
from kvpool.events import BlocksEvicted, ForwardRan, PeerLost, RequestResumed, SliceAnnounced
from kvpool.metrics import METRICS, WINGS, Metrics, render_table

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
UNITS = {
    "counter": (
        "blocks",
        "bytes",
        "peers",
        "stores",
        "passes",
        "tokens",
        "requests",
        "names",
        "calls",
    ),
    "gauge": ("count", "bytes"),
    "histogram": ("seconds", "bytes"),
}


def test_the_docs_list_every_metric() -> None:
    assert render_table() in DOCS.read_text()


def test_names_carry_wing_noun_unit_and_total() -> None:
    for metric in METRICS:
        units = "|".join(UNITS[metric.kind])
        tail = "_total" if metric.kind == "counter" else ""
        wings = "tiers|transfer|index|server|runtime|conductor"
        pattern = rf"kvpool_({wings})_([a-z]+_)*({units}){tail}"
        assert re.fullmatch(pattern, metric.name), metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_label_sets_are_closed() -> None:
    metrics = Metrics()
    with pytest.raises(UsageError, match="state is 'lost'"):
        metrics.set("kvpool_tiers_slot_count", 1, tier="dram", state="lost")
    with pytest.raises(UsageError, match="labels"):
        metrics.set("kvpool_tiers_slot_count", 1, tier="dram")
    with pytest.raises(UsageError, match="no counter"):
        metrics.count("kvpool_tiers_slot_count")
    with pytest.raises(UsageError, match="add it there"):
        metrics.count("kvpool_made_up_total")


def test_a_process_shows_only_what_it_feeds() -> None:
    metrics = Metrics(wings=("conductor",))
    metrics.emit(ForwardRan(role="decode", requests=3, tokens=3))
    metrics.emit(RequestResumed(tokens=3, reason="gone"))
    shown = metrics.expose().decode()
    assert "kvpool_conductor_resumed_requests_total 1.0" in shown
    assert "kvpool_server" not in shown
    assert "kvpool_runtime" not in shown
    with pytest.raises(UsageError):
        metrics.count("kvpool_runtime_forward_tokens_total", role="decode")


def test_events_are_counted() -> None:
    metrics = Metrics(wings=WINGS)
    for event in (
        ForwardRan(role="decode", requests=3, tokens=3),
        ForwardRan(role="decode", requests=2, tokens=2),
        SliceAnnounced(request="r", chunk=0, layer=0, blocks=4, staged_bytes=100),
        BlocksEvicted(tier="dram", reason="capacity", blocks=3, size_bytes=7),
        BlocksEvicted(tier="dram", reason="a new one", blocks=1, size_bytes=1),
        PeerLost(peer="someone", reason="gone"),
        RequestResumed(tokens=3, reason="PeerUnreachableError"),
    ):
        metrics.emit(event)
    shown = metrics.expose().decode()
    assert 'kvpool_runtime_forward_passes_total{role="decode"} 2.0' in shown
    assert 'kvpool_runtime_forward_tokens_total{role="decode"} 5.0' in shown
    assert 'kvpool_transfer_slice_blocks_total{direction="announced"} 4.0' in shown
    assert "kvpool_transfer_staged_bytes_total 100.0" in shown
    assert "kvpool_conductor_resumed_requests_total 1.0" in shown
    assert 'kvpool_tiers_evicted_blocks_total{reason="capacity",tier="dram"} 3.0' in shown
    assert 'kvpool_tiers_evicted_blocks_total{reason="other",tier="dram"} 1.0' in shown
    assert 'kvpool_tiers_evicted_bytes_total{tier="dram"} 8.0' in shown
    assert 'kvpool_transfer_lost_peers_total{peer="other"} 1.0' in shown


def test_registries_do_not_share() -> None:
    first, second = Metrics(), Metrics()
    first.set("kvpool_server_lease_count", 5)
    assert "kvpool_server_lease_count 0.0" in second.expose().decode()
