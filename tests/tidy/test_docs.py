"""What the documents say can be done can be done."""

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.block import BlockLayout, Namespace
from kvpool.config import PoolConfig
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool
from tests.tidy import docs
from tests.tidy.mirror import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
EVERY = pytest.mark.parametrize("path", docs.documents(), ids=lambda path: path.name)


@EVERY
def test_commands_and_paths(path: Path) -> None:
    text = path.read_text()
    assert not docs.missing_targets(text, MAKEFILE)
    assert not docs.missing_commands(text)
    assert not list(docs.missing_paths(text, path.parent))


def test_wrong_prose_is_found(tmp_path: Path) -> None:
    text = "Say `make tea`, run `kvpool-brew --hot`, read `tiers/nothing.py` and [this](no.md)."
    assert docs.missing_targets(text, MAKEFILE) == ["tea"]
    assert docs.missing_commands(text) == ["kvpool-brew"]
    assert list(docs.missing_paths(text, tmp_path)) == ["tiers/nothing.py", "no.md"]
    assert docs.flags(text, "kvpool-brew") == {"--hot"}
    fenced = "```\nkvpool-serve --port 1   # a comment\nmake coffee\n```"
    assert docs.flags(fenced, "kvpool-serve") == {"--port"}
    assert docs.missing_targets(fenced, MAKEFILE) == ["coffee"]


@pytest.mark.parametrize("command", ["kvpool-serve", "kvpool-server"])
def test_flags_exist(command: str) -> None:
    named = {flag for path in docs.documents() for flag in docs.flags(path.read_text(), command)}
    done = subprocess.run(
        [Path(sys.executable).parent / command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert named - {"--help"} <= set(done.stdout.replace(",", " ").replace("]", " ").split())


@EVERY
def test_snippets_name_what_exists(path: Path) -> None:
    for code in docs.snippets(path.read_text(), "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "kvpool":
                assert hasattr(importlib.import_module("kvpool"), node.attr), ast.unparse(node)


LAYOUT = BlockLayout(num_layers=2, kv_heads=2, block_tokens=16, k_dim=4, v_dim=4)
NAMESPACE = Namespace(
    model="m", weights="0" * 64, compute_dtype="float32", kv_dtype="float32", block_tokens=16
)


def test_the_steps_of_the_api_run_as_written(tmp_path: Path) -> None:
    """The first snippet of docs/api.md, in a pool that holds two of three blocks."""
    (code, *_) = docs.snippets((ROOT / "docs" / "api.md").read_text(), "python")
    stored = BlockView.of_buffer(LAYOUT, Span.of(bytearray(b"ab") * LAYOUT.block_bytes))
    found = bytearray(2 * LAYOUT.block_bytes)
    with Pool.open(LAYOUT, PoolConfig(dram_bytes=1 << 20)) as pool:
        tokens = list(range(48))
        chain = pool.chain(NAMESPACE, tokens)
        pool.store(chain, stored, deadline_s=30).wait(timeout_s=30)
        names = {
            "pool": pool,
            "namespace": NAMESPACE,
            "tokens": tokens,
            "dest": BlockView.of_buffer(LAYOUT, Span.of(found)),
            "source": BlockView.of_buffer(LAYOUT, Span.of(bytearray(LAYOUT.block_bytes))),
        }
        written = tmp_path / "api.py"
        written.write_text(code)
        assert runpy.run_path(str(written), names)["delivered"] == 2
        assert found == b"ab" * LAYOUT.block_bytes
        # The rest was stored: its completion may still be under way.
        pool.store(chain, stored, deadline_s=30).wait(timeout_s=30)
        assert pool.stats().leases == 0


def test_the_pool_of_the_readme_runs_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first Python snippet of the README stands on its own; each line ``#=`` is its output."""
    (code, *_) = docs.snippets((ROOT / "README.md").read_text(), "python")
    written = tmp_path / "readme.py"
    written.write_text(code)
    runpy.run_path(str(written))
    promised = [line.split("#=")[1].strip() for line in code.splitlines() if "#=" in line]
    assert promised
    assert capsys.readouterr().out.split("\n")[:-1] == promised


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert "loaded 4 blocks, equal: True" in done.stdout
