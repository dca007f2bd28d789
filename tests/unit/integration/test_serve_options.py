"""The command line of kvpool-serve: workers and their share of the machine."""

import os
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.integration.serve import child_commands
from kvpool.integration.serve_options import WORKERS_MAX, default_threads, parse_arguments
from kvpool.server.options import arguments_of, settings_of


def test_workers_have_names_and_a_process_each() -> None:
    options = parse_arguments(["--prefill", "2", "--decode", "3", "--trace-dir", "trace"])
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}
    assert options.workers == roles
    commands = child_commands(options, Path("model"), Path("run"))
    assert list(commands) == ["pool", *roles]
    for name, role in roles.items():
        command = list(commands[name])
        assert command[command.index("-m") + 1] == f"kvpool.integration.runtime.{role}"
        assert command[command.index("--name") + 1] == name
        assert command[command.index("--trace") + 1] == f"trace/{name}.jsonl"


def test_the_processors_are_shared() -> None:
    processors = len(os.sched_getaffinity(0))
    assert default_threads(1) == processors
    assert default_threads(processors + 1) == 1
    assert parse_arguments([]).threads == default_threads(2)
    assert parse_arguments(["--prefill", "3", "--decode", "2"]).threads == default_threads(5)
    assert parse_arguments(["--threads", "7"]).threads == 7


def test_the_pool_keeps_blocks_on_an_ssd_if_asked() -> None:
    options = parse_arguments(["--ssd", "kv", "--ssd-bytes", "1GiB"])
    pool = list(child_commands(options, Path("model"), Path("run"))["pool"])
    assert pool[pool.index("--ssd") + 1] == "kv"
    assert pool[pool.index("--ssd-bytes") + 1] == str(1 << 30)
    assert "--ssd" not in child_commands(parse_arguments([]), Path("model"), Path("run"))["pool"]
    for flags in (["--ssd", "kv"], ["--ssd-bytes", "1GiB"]):
        with pytest.raises(ConfigError, match="go together"):
            parse_arguments(flags)


def test_every_process_loads_the_library_that_is_named() -> None:
    options = parse_arguments(["--transport", "ucx", "--ucx-library", "/opt/ucx/lib/libucp.so"])
    for name, command in child_commands(options, Path("model"), Path("run")).items():
        words = list(command)
        arguments = words[words.index("--run-dir") :]
        path = words[words.index("--ucx-library") + 1]
        assert path == "/opt/ucx/lib/libucp.so"
        if name == "pool":
            settings = settings_of(arguments_of(arguments))
            assert settings.transfer.ucx_library == path
    commands = child_commands(parse_arguments([]), Path("model"), Path("run"))
    assert not any("--ucx-library" in command for command in commands.values())


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
@pytest.mark.parametrize("count", [0, -1, WORKERS_MAX + 1])
def test_a_silly_number_of_workers_is_refused(flag: str, count: int) -> None:
    with pytest.raises(ConfigError, match=flag):
        parse_arguments([flag, str(count)])
