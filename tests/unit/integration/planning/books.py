"""A second account of what a cluster should show, kept the slow way: sums over live requests."""

import math
import random
from dataclasses import dataclass

from kvpool.integration.conductor.cluster import Cluster
from kvpool.integration.conductor.plan import Plan
from kvpool.integration.conductor.snapshot import Request, Snapshot


@dataclass
class _Live:
    request: Request
    plan: Plan
    end_s: float
    queue_end_s: float
    stage: str = "prefill"
    joined_at_s: float = 0.0
    produced: int = 0


class Books:
    """Tells a cluster what happens, and says what its columns must be then."""

    def __init__(self, cluster: Cluster, decode_s: float) -> None:
        self._cluster = cluster
        self._decode_s = decode_s
        self.under_way: dict[int, _Live] = {}
        workers = len(cluster.prefill.node)
        self._free_at_s = cluster.prefill.free_at_s.tolist()
        self._drift_s = [0.0] * workers
        self._sends_s = cluster.nodes.send_free_at_s.tolist()
        self._receives_s = cluster.nodes.receive_free_at_s.tolist()

    def commit(self, now_s: float, request: Request, plan: Plan) -> None:
        """Carry out a plan."""
        self._cluster.commit(now_s, request, plan)
        end_s = now_s + max(plan.wait_s, plan.transfer_s) + plan.prefill_s
        self._free_at_s[plan.prefill] = end_s
        queue_end_s = end_s - self._drift_s[plan.prefill]
        self.under_way[request.number] = _Live(request, plan, now_s + plan.ttft_s, queue_end_s)
        if plan.transfer is not None:
            self._sends_s[plan.transfer.source] = now_s + plan.transfer_s
            self._receives_s[plan.transfer.target] = now_s + plan.transfer_s

    def event(self, chance: random.Random, now_s: float) -> None:
        """Let something happen to one of the requests."""
        if not self.under_way:
            return
        number = chance.choice(list(self.under_way))
        live = self.under_way[number]
        if live.stage != "decode" and chance.random() < 0.2:
            self._cluster.cancel(number, now_s)
            del self.under_way[number]
            if live.stage == "prefill":
                self._queue_shrinks(live, now_s)
        elif live.stage == "prefill":
            self._cluster.prefill_done(number, now_s)
            live.stage = "between"
            if self._queue_shrinks(live, now_s):
                drift_s = now_s - live.queue_end_s
                self._free_at_s[live.plan.prefill] += drift_s - self._drift_s[live.plan.prefill]
                self._drift_s[live.plan.prefill] = drift_s
        elif live.stage == "between":
            self._cluster.joined(number, now_s)
            live.stage, live.joined_at_s = "decode", now_s
        elif chance.random() < 0.6:
            self._cluster.advance(live.plan.decode, 3)
            live.produced += 3
        else:
            self._cluster.left(number, now_s, live.produced)
            del self.under_way[number]
            self._decode_s += 0.01 * (now_s - live.joined_at_s - self._decode_s)

    def _queue_shrinks(self, live: _Live, now_s: float) -> int:
        worker = live.plan.prefill
        queued = sum(
            one.stage == "prefill" and one.plan.prefill == worker for one in self.under_way.values()
        )
        if not queued:
            self._free_at_s[worker] = now_s
        return queued

    def check(self, snapshot: Snapshot) -> None:
        """Compare everything that a snapshot shows."""
        live = list(self.under_way.values())
        prefill, decode, flow = snapshot.prefill, snapshot.decode, snapshot.flow
        for worker in range(len(prefill.node)):
            queue = [one for one in live if one.plan.prefill == worker and one.stage == "prefill"]
            assert prefill.queued[worker] == len(queue)
            assert math.isclose(prefill.free_at_s[worker], self._free_at_s[worker])
        for worker in range(len(decode.node)):
            mine = [one for one in live if one.plan.decode == worker]
            running = [one for one in mine if one.stage == "decode"]
            joining = [one for one in mine if one.stage != "decode"]
            assert decode.running[worker] == len(running)
            assert decode.joining[worker] == len(joining)
            context = sum(one.request.tokens + one.produced for one in running)
            assert decode.context_tokens[worker] == context
            assert decode.joining_tokens[worker] == sum(one.request.tokens for one in joining)
            promised = sum(one.request.tokens + one.request.output_tokens for one in mine)
            assert decode.free_tokens[worker] == decode.tokens_max[worker] - promised
        assert list(flow.prefill_ends_s) == sorted(
            one.end_s for one in live if one.stage != "decode"
        )
        assert list(flow.decode_starts_s) == sorted(
            one.joined_at_s for one in live if one.stage == "decode"
        )
        assert math.isclose(flow.decode_s, self._decode_s)
        assert snapshot.nodes.send_free_at_s.tolist() == self._sends_s
        assert snapshot.nodes.receive_free_at_s.tolist() == self._receives_s
