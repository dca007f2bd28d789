"""A profile: how long things take on one machine with one model, as measured and as fitted.

Owns the profile's file format and the meaning of its numbers. Who calls it: `kvpool profile`
writes one; the planner and the simulator read it, through `cost.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvpool.errors import FormatVersionError, UsageError
from kvpool.integration.conductor.fit import FitError, fit

FORMAT: Final = 1

_Weight = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class PrefillSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured prefill of ``tokens``, of which ``cached_tokens`` were there."""

    tokens: _Count
    cached_tokens: _Count
    seconds: _Seconds


class DecodeSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured decode step of ``running`` requests with ``context_tokens`` in all."""

    running: _Count
    context_tokens: _Count
    seconds: _Seconds


class TransferSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured move of ``size_bytes`` of KV."""

    size_bytes: _Count
    seconds: _Seconds


class PrefillFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``base_s + token_s * (n - c) + attention_s * (n * n - c * c)``; n tokens, c of them cached.

    New tokens attend to all before them, cached or not: over positions c to n that is
    ``(n * n - c * c) / 2`` pairs.
    """

    base_s: _Weight
    token_s: _Weight
    attention_s: _Weight
    error: FitError


class DecodeFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``base_s + request_s * running + token_s * context_tokens``."""

    base_s: _Weight
    request_s: _Weight
    token_s: _Weight
    error: FitError


class TransferFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``base_s + size_bytes / bytes_per_s`` on an idle link."""

    base_s: _Weight
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    error: FitError


class Samples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured; kept in the file, so that a fit can be checked and made anew."""

    prefill: tuple[PrefillSample, ...]
    decode: tuple[DecodeSample, ...]
    transfer: tuple[TransferSample, ...]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things take on one machine with one model.

    Attributes:
        format: Version of the file.
        model, machine: For people.
        kv_bytes_per_token: Bytes of KV that one token has.
        prefill, decode, transfer: The fits.
        samples: What they were fitted to.
    """

    format: int = FORMAT
    model: str
    machine: str
    kv_bytes_per_token: Annotated[float, msgspec.Meta(gt=0)]
    prefill: PrefillFit
    decode: DecodeFit
    transfer: TransferFit
    samples: Samples


def fitted(model: str, machine: str, kv_bytes_per_token: float, samples: Samples) -> Profile:
    """Make a profile of measurements.

    Raises:
        UsageError: There are too few of a kind.
    """
    prefill, prefill_error = fit(
        [
            (1.0, one.tokens - one.cached_tokens, one.tokens**2 - one.cached_tokens**2)
            for one in samples.prefill
        ],
        [one.seconds for one in samples.prefill],
    )
    decode, decode_error = fit(
        [(1.0, one.running, one.context_tokens) for one in samples.decode],
        [one.seconds for one in samples.decode],
    )
    transfer, transfer_error = fit(
        [(1.0, one.size_bytes) for one in samples.transfer],
        [one.seconds for one in samples.transfer],
    )
    largest = max(samples.transfer, key=lambda one: one.size_bytes)
    return Profile(
        model=model,
        machine=machine,
        kv_bytes_per_token=kv_bytes_per_token,
        prefill=PrefillFit(
            base_s=prefill[0], token_s=prefill[1], attention_s=prefill[2], error=prefill_error
        ),
        decode=DecodeFit(
            base_s=decode[0], request_s=decode[1], token_s=decode[2], error=decode_error
        ),
        transfer=TransferFit(
            base_s=transfer[0],
            # Where more bytes took no longer, the largest transfer says the most.
            bytes_per_s=1 / transfer[1] if transfer[1] else largest.size_bytes / largest.seconds,
            error=transfer_error,
        ),
        samples=samples,
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON. Raises UsageError if the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as refused:
        raise UsageError(f"cannot write {path}: {refused.strerror}", path=str(path)) from refused


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        UsageError: The file cannot be read, or a key of it is unknown, missing or out of range.
        FormatVersionError: Another version of kvpool wrote it.
    """
    try:
        raw = path.read_bytes()
    except OSError as refused:
        raise UsageError(f"cannot read {path}: {refused.strerror}", path=str(path)) from refused
    try:
        version = msgspec.json.decode(raw, type=_Head).format
        if version != FORMAT:
            raise FormatVersionError(
                f"{path} has format {version}, this kvpool reads {FORMAT}: measure anew with "
                "kvpool profile",
                path=str(path),
            )
        return msgspec.json.decode(raw, type=Profile)
    except msgspec.MsgspecError as wrong:
        raise UsageError(f"{path} is no profile: {wrong}", path=str(path)) from wrong


class _Head(msgspec.Struct, frozen=True):
    format: int


def describe(profile: Profile) -> Sequence[str]:
    """Tell a person what was fitted and how far it is from what was measured, a line each."""
    lines = []
    for name, error, count in (
        ("prefill", profile.prefill.error, len(profile.samples.prefill)),
        ("decode step", profile.decode.error, len(profile.samples.decode)),
        ("transfer", profile.transfer.error, len(profile.samples.transfer)),
    ):
        held_out = "-" if error.held_out is None else f"{error.held_out:.1%}"
        lines.append(
            f"{name:<12} {count:>3} measured; error mean {error.mean:.1%}, worst {error.worst:.1%}, "
            f"of one left out {held_out}"
        )
    return lines
