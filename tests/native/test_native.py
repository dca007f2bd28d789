"""The C core: its own tests under sanitizers, strict warnings, and gcc's static analyser.

Each program in native/tests includes the source it tests, and so reaches what is private to it; the
other sources are linked. A planted bug shows that the sanitizers are there and end a program.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
SOURCES = sorted((NATIVE / "src").glob("*.c"))
TESTS = sorted((NATIVE / "tests").glob("test_*.c"))
INCLUDE = f"-I{NATIVE / 'include'}"
STRICT = ["-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-g", "-O1"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# ThreadSanitizer does not model fences, and gcc warns of it. Ours order memory against another
# process's mapping, which it could not see either.
THREAD = ["-fsanitize=thread", "-Wno-tsan"]
THREADED = {
    "test_arena",
    "test_bell",
    "test_crew",
    "test_window",
    "test_mailbox",
    "test_ledger",
    "test_ssd_ends",
    "test_ssd_job",
}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def gcc(*arguments: str | Path) -> None:
    """Run gcc and fail with what it said."""
    done = subprocess.run(
        ["gcc", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run(program: Path) -> subprocess.CompletedProcess[str]:
    """Run a test program; none takes more than a few seconds."""
    return subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Compile every source once for each sanitizer: sanitizer to source's name to object."""
    made: dict[str, dict[str, Path]] = {}
    for name, flags in {"address": ADDRESS, "thread": THREAD}.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = {source.stem: folder / f"{source.stem}.o" for source in SOURCES}
        for source in SOURCES:
            gcc(*STRICT, *flags, INCLUDE, "-c", source, "-o", made[name][source.stem])
    return made


def build(test: Path, flags: list[str], objects: dict[str, Path], program: Path) -> Path:
    """Link a test, which includes a source or two, itself or through a header, with the others."""
    listed = subprocess.run(
        ["gcc", INCLUDE, "-MM", test], capture_output=True, text=True, check=True
    ).stdout
    included = {Path(name).stem for name in listed.split() if name.endswith(".c")}
    others = [path for name, path in objects.items() if name not in included]
    gcc(*STRICT, *flags, INCLUDE, test, *others, "-o", program, "-lpthread", "-ldl")
    return program


def test_every_source_has_a_test() -> None:
    # Sources of one noun (ledger_*, ssd_*) are tested together; those of UCX: test_ucx_engine.py.
    nouns = {path.stem.split("_")[0] for path in SOURCES} - {"ucx", "ucp"}
    untested = nouns - {path.stem.removeprefix("test_").split("_")[0] for path in TESTS}
    assert not untested


@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.stem)
def test_under_address_sanitizer(
    test: Path, objects: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    done = run(build(test, ADDRESS, objects["address"], tmp_path / "program"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(THREADED))
def test_under_thread_sanitizer(
    name: str, objects: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    test = NATIVE / "tests" / f"{name}.c"
    done = run(build(test, THREAD, objects["thread"], tmp_path / "program"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_analyser_finds_nothing(source: Path, tmp_path: Path) -> None:
    gcc(*STRICT, "-fanalyzer", INCLUDE, "-c", source, "-o", tmp_path / "object.o")


@pytest.mark.parametrize(
    ("flags", "bug", "message"),
    [
        (ADDRESS, "int *p = malloc(4); free(p); return *(volatile int *)p;", "use-after-free"),
        (ADDRESS, "volatile int big = 0x7fffffff; return big + 1 == 0;", "overflow"),
        (
            THREAD,
            "pthread_t t; pthread_create(&t, 0, add, 0); add(0); pthread_join(t, 0); return 0;",
            "data race",
        ),
    ],
    ids=["freed", "overflow", "race"],
)
def test_planted_bug_is_found(flags: list[str], bug: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "planted.c"
    source.write_text(
        "#include <pthread.h>\n#include <stdlib.h>\n"
        "static volatile int shared;\n"
        "void *add(void *unused) { shared++; return unused; }\n"
        f"int main(void) {{ {bug} }}\n"
    )
    program = tmp_path / "program"
    gcc("-g", "-O1", "-w", *flags, source, "-o", program, "-lpthread")
    done = run(program)
    assert done.returncode != 0
    assert message in done.stderr
