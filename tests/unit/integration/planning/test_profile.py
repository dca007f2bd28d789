"""Profiles: the papers' machine as they print it, and files that are whole or refused by key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.errors import FormatVersionError, UsageError
from kvpool.integration.conductor.cost import ProfiledCost
from kvpool.integration.conductor.papers import papers_profile
from kvpool.integration.conductor.profile import (
    Samples,
    TransferSample,
    describe,
    fitted,
    read_profile,
    write_profile,
)


def test_the_papers_machine_is_as_printed() -> None:
    profile = papers_profile()
    cost = ProfiledCost(profile)
    # FAST'25 figure 14: prefill of 32k tokens, cold; and figure 15: TBT at 8 decode nodes.
    assert cost.prefill_s(32 * 1024, 0) == pytest.approx(4.48, rel=0.1)
    assert cost.prefill_s(128 * 1024, 0) == pytest.approx(27.52, rel=0.1)
    assert cost.decode_step_s(5, 5 * 15_325) == pytest.approx(0.0351, rel=0.1)
    # 8k tokens of 320 KiB each, moved and loaded: figure 14.
    assert cost.transfer_s(0.95 * 8192, profile.transfer.bytes_per_s) == pytest.approx(0.06, 0.1)
    assert profile.prefill.error.mean < 0.06
    assert profile.decode.error.mean < 0.04
    assert profile.transfer.error.mean < 0.02
    assert [line.split()[0] for line in describe(profile)] == ["prefill", "decode", "transfer"]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(papers_profile(), path)
    assert read_profile(path) == papers_profile()


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(msgspec.json.encode(papers_profile()))
    change(fields)
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no profile"),
        (b"{}", "format"),
        (b'{"format": 1}', "missing required field `model`"),
        (_changed(lambda fields: fields.update(speed=1)), "unknown field `speed`"),
        (_changed(lambda fields: fields["prefill"].update(token_s=-1.0)), r"prefill\.token_s"),
        (_changed(lambda fields: fields["decode"].update(base_s="x")), r"decode\.base_s"),
        (_changed(lambda fields: fields["transfer"].update(bytes_per_s=0)), "bytes_per_s"),
        (_changed(lambda fields: fields.update(kv_bytes_per_token=0)), "kv_bytes_per_token"),
        (
            _changed(lambda fields: fields["samples"]["prefill"][3].update(seconds=0)),
            r"samples\.prefill\[3\]\.seconds",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as refused:
        read_profile(path)
    assert refused.value.path == str(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(_changed(lambda fields: fields.update(format=2)))
    with pytest.raises(FormatVersionError, match="measure anew"):
        read_profile(path)


def test_files_that_cannot_be_read_or_written_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot write"):
        write_profile(papers_profile(), tmp_path / "none" / "profile.json")


def test_transfers_that_take_no_longer_for_more_bytes_have_the_largest_ones_rate() -> None:
    samples = papers_profile().samples
    flat = Samples(
        prefill=samples.prefill,
        decode=samples.decode,
        transfer=(TransferSample(1000, 0.2), TransferSample(2000, 0.1)),
    )
    assert fitted("m", "here", 1.0, flat).transfer.bytes_per_s == pytest.approx(20_000)
