"""The generated messages are those of the .proto file."""

import subprocess
import sys
from pathlib import Path

import kvpool.client.kvpool_pb2

FOLDER = Path(kvpool.client.kvpool_pb2.__file__).resolve().parent


def test_the_generated_code_is_of_this_proto_file(tmp_path: Path) -> None:
    """If it is not: protoc's own command, with ``kvpool/client`` for the folder, makes it anew."""
    made = ["--python_out", str(tmp_path), "--pyi_out", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", *made, "kvpool.proto"],
        check=True,
    )
    for name in ("kvpool_pb2.py", "kvpool_pb2.pyi"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), name
