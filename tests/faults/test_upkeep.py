"""A server each of whose periodic tasks fails, once or always: it serves, says so, and is well again."""

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvpool.client.connect import connect
from kvpool.metrics import METRICS
from tests.etcd_process import free_port
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, store
from tests.server_process import WAIT_S
from tests.waiting import until

TASKS = ("leases", "clients", "tenants", "gauges", "directory", "names")

# What each task calls raises: in its first turn alone, or until SIGUSR1 comes.
FAILING = """
import signal, sys
from kvpool.server import main, naming, service, sessions, shard, tenancy, tier_report

once = sys.argv.pop(1) == "once"
over = False

def heal(*_):
    global over
    over = True

signal.signal(signal.SIGUSR1, heal)

def break_it(owner, name):
    work, count = getattr(owner, name), 0
    def broken(*arguments):
        nonlocal count
        count += 1
        if not over and (count == 1 or not once):
            raise ZeroDivisionError(f"in {name}")
        return work(*arguments)
    setattr(owner, name, broken)

break_it(service.PoolService, "_expire_leases")
break_it(sessions.Sessions, "expire")
break_it(tier_report.TierReport, "tell")
break_it(shard.Shard, "tick")
break_it(tenancy.Tenancy, "sweep")
break_it(naming.Naming, "tick")
sys.exit(main.main(sys.argv[1:]))
"""


def test_the_tasks_are_those_of_the_metric() -> None:
    [metric] = [one for one in METRICS if one.name == "kvpool_server_failed_upkeep_passes_total"]
    assert dict(metric.labels)["task"] == TASKS


def answer(port: int, path: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as reply:
            text: str = reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
    return text


@pytest.mark.parametrize("how", ["once", "always"])
def test_a_server_whose_tasks_fail_serves_and_says_so(
    how: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run_dir = tmp_path_factory.mktemp("r") / "d"
    port, http = free_port(), free_port()
    config = tmp_path / "pool.toml"
    config.write_text(
        f'[node]\nname = "a"\n[listen]\naddress = "127.0.0.1:{port}"\nhttp = "127.0.0.1:{http}"\n'
        f"[ring]\nannounce_interval_s = 0.02\n"
        f'[[ring.members]]\nname = "a"\naddress = "127.0.0.1:{port}"\n'
        f"[pool]\ndram = {64 * LAYOUT.block_bytes}\n"
    )

    def failures() -> dict[str, float]:
        lines = [
            line
            for line in answer(http, "/metrics").splitlines()
            if "failed_upkeep_passes_total{" in line
        ]
        return {task: float(line.split()[-1]) for task in TASKS for line in lines if task in line}

    with subprocess.Popen(
        [sys.executable, "-c", FAILING, how, "--run-dir", run_dir, "--config", config],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            assert server.stdout.readline().startswith("kvpool-server ready")
            with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
                assert store(pool, 1) == CHAIN_BLOCKS
                wanted = 1.0 if how == "once" else 5.0
                until(lambda: all(failures()[task] >= wanted for task in TASKS), "all have failed")
                if how == "always":
                    ready = answer(http, "/readyz")
                    for task in TASKS:
                        assert f"{task} fails: ZeroDivisionError: in " in ready
                    server.send_signal(signal.SIGUSR1)
                until(lambda: answer(http, "/readyz") == "ok\n", "it is well again")
                if how == "once":
                    assert set(failures().values()) == {1.0}
                assert answer(http, "/healthz") == "ok\n"
                assert store(pool, 2) == CHAIN_BLOCKS
            server.send_signal(signal.SIGTERM)
            assert server.wait(WAIT_S) == 0
            said = server.stderr.read()
        finally:
            server.kill()
    for task in TASKS:
        assert said.count(f"ERROR {task} failed (ZeroDivisionError: in ") == 1, said
