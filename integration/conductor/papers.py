"""The papers' machine, from what the papers print: one node of 8 x A800 with a 70B model.

Owns the published figures and what had to be derived from them. Who calls it: the simulator, and
whoever plans without a measured profile.
"""

from functools import cache
from typing import Final

from kvpool.integration.conductor.profile import (
    DecodeSample,
    PrefillSample,
    Profile,
    Samples,
    TransferSample,
    fitted,
)

# LLaMA3-70B: 80 layers x 8 KV heads x 128 x (K, V) x 2 bytes.
KV_BYTES_PER_TOKEN: Final = 327_680

# FAST'25, figure 14: seconds of prefill, and of transfer and load, by length and cached share.
_LENGTHS: Final = tuple(thousands * 1024 for thousands in (8, 16, 32, 64, 128))
_PREFILL_COLD_S: Final = (1.00, 2.05, 4.48, 10.58, 27.52)
_PREFILL_CACHED_S: Final = (0.13, 0.23, 0.41, 0.88, 2.33)
_CACHED_SHARE: Final = 0.95
_TRANSFER_S: Final = (0.06, 0.12, 0.23, 0.46, 0.92)

# FAST'25, figure 14: 128 tokens of one request took 3.4 s after 8k tokens and 3.9 s after 128k.
_ALONE: Final = ((8 * 1024, 3.4 / 128), (128 * 1024, 3.9 / 128))

# FAST'25, figure 15: mean TBT by the number of decode nodes out of 16, on the synthetic trace.
_TBT_S: Final = {11: 0.0316, 10: 0.0318, 9: 0.0329, 8: 0.0351, 7: 0.0383, 6: 0.0443, 5: 0.0584}
_SYNTHETIC_INPUT: Final = 15_325
_SYNTHETIC_OUTPUT: Final = 149
# Not printed, derived: with 5 prefill nodes the queue was nearly full (TTFT 5.7 s instead of 1.1),
# say 0.9, at 0.73 s of prefill a request (figure 8): 0.9 * 5 / 0.73 requests per second.
_RATE_PER_S: Final = 6.2


def _decode_samples() -> tuple[DecodeSample, ...]:
    """Figure 14 gives batches of one; figure 15 larger ones, by Little's law.

    A node decodes rate * output / nodes tokens per second, each of which takes a TBT: that many
    run at a time, on average, and a request that looks sees one more, itself.
    """
    samples = [DecodeSample(1, tokens, seconds) for tokens, seconds in _ALONE]
    for nodes, tbt_s in _TBT_S.items():
        running = round(_RATE_PER_S * _SYNTHETIC_OUTPUT / nodes * tbt_s + 1)
        samples.append(DecodeSample(running, running * _SYNTHETIC_INPUT, tbt_s))
    return tuple(samples)


@cache
def papers_profile() -> Profile:
    """Return the profile of the papers' machine. Fitted once a process; the errors are in it."""
    cached = [int(tokens * _CACHED_SHARE) for tokens in _LENGTHS]
    prefill = [
        *zip(_LENGTHS, [0] * len(_LENGTHS), _PREFILL_COLD_S, strict=True),
        *zip(_LENGTHS, cached, _PREFILL_CACHED_S, strict=True),
    ]
    return fitted(
        model="LLaMA3-70B, dummy weights",
        machine="8 x A800-80G, 4 x 200 Gbps, as printed in FAST'25",
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        samples=Samples(
            prefill=tuple(PrefillSample(*sample) for sample in prefill),
            decode=_decode_samples(),
            transfer=tuple(
                TransferSample(tokens * KV_BYTES_PER_TOKEN, seconds)
                for tokens, seconds in zip(cached, _TRANSFER_S, strict=True)
            ),
        ),
    )
