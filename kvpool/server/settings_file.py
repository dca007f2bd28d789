"""kvpool-server's configuration file: read with errors that say where, and printed from the code.

Owns the TOML edge of ``settings.py``. ``docs/server.md`` holds ``render_table()``, and
``kvpool-server --print-config`` prints ``render_file()``. Who calls it: the server's main.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Final, cast, get_args, get_origin, get_type_hints

import msgspec

from kvpool.config import parse_size
from kvpool.errors import ConfigError
from kvpool.server.settings import FileSettings, Section, Size

FILE_BYTES_MAX: Final = 1 << 20
_EXAMPLE: Final = '"..."'


def read_settings(path: Path) -> FileSettings:
    """Read a configuration file. Raises ConfigError: it names the key, and the line if it can."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is no configuration: over {FILE_BYTES_MAX} bytes")
    try:
        return parse_settings(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}", path=str(path)) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key, path=str(path)) from error


def parse_settings(text: str) -> FileSettings:
    """Turn the text of a file into settings. Raises ConfigError as ``read_settings``."""
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"this is no TOML: {error}") from error
    _require_plain(fields, "")
    try:
        return msgspec.convert(fields, FileSettings, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise _explained(str(error), text) from error


def _require_plain(value: object, key: str) -> None:
    """Raise ConfigError for a text with a NUL character: no path, name or address has one."""
    if isinstance(value, dict):
        for name, each in cast("dict[str, object]", value).items():
            _require_plain(each, f"{key}.{name}".strip("."))
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            _require_plain(each, key)
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{key}: {value[:80]!r} has a NUL character: remove it", key=key)


def _decode(kind: type, value: object) -> object:
    """Turn a value of a file into bytes; what is no size is for msgspec to name."""
    if kind is not Size:
        raise NotImplementedError(kind)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("Expected a number of bytes, or a text such as 8GiB")
    if isinstance(value, str):
        try:
            return Size(parse_size(value))
        except ConfigError as error:
            raise ValueError(str(error)) from error
    if value < 0:
        raise ValueError("Expected 0 or more bytes")
    return Size(value)


# ---- errors that say where -------------------------------------------------------------------------

_WHERE: Final = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_HEADER: Final = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")


def _explained(message: str, text: str) -> ConfigError:
    found = _WHERE.match(message)
    what, place = (found[1], found[2] or "") if found else (message, "")
    unknown = _UNKNOWN.match(what)
    bare = re.sub(r"\[\.*\d*\]", "", place)
    if unknown:
        key = f"{bare}.{unknown[1]}".strip(".")
        near = difflib.get_close_matches(key, [row.key for row in _rows()], 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "kvpool-server --print-config shows all keys"
        said = f"there is no key {key}: {hint}"
    else:
        key = bare
        said = f"{key or 'the file'}: {what}"
    line = _line_of(key, text)
    return ConfigError(f"line {line}: {said}" if line else said, key=key)


def _line_of(key: str, text: str) -> int:
    """Return the first line that sets a key, or opens its section; 0 if that cannot be told."""
    section = opened = 0
    at = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            at = header[1].replace('"', "").replace(" ", "")
            opened = number if key == at or key.startswith(f"{at}.") else 0
            section = opened or section
            if at == key:
                return number
            continue
        name = line.split("=", 1)[0].strip().strip('"')
        full = f"{at}.{name}".strip(".")
        if "=" in line and (full == key or key.startswith(f"{full}.")):
            return number
    return section


# ---- what is written from the code -----------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One key: its whole name, how it is written, its default as TOML, and its meaning."""

    key: str
    kind: str
    default: str
    meaning: str


_KINDS: Final = {str: "text", int: "number", float: "seconds", bool: "true or false", Size: "size"}


def _rows() -> list[Row]:
    return [row for _, rows in _sections(FileSettings, "") for row in rows]


def _sections(section: type[Section], name: str) -> list[tuple[tuple[str, str], list[Row]]]:
    """Return each section below one, with its rows: (name in brackets, what it is) and the keys."""
    rows: list[Row] = []
    below: list[tuple[tuple[str, str], list[Row]]] = []
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint, meaning = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, meta = get_args(hint)
            meaning = meta.description or ""
        full = f"{name}.{field.name}".strip(".")
        inner = get_args(hint)[0] if get_origin(hint) is list else hint
        if isinstance(inner, type) and issubclass(inner, Section):
            below += _sections(inner, f"{full}[]" if inner is not hint else full)
            continue
        kind = "list of texts" if inner is not hint else _KINDS[hint]
        key = full.replace("[]", "")
        rows.append(Row(key, kind, _toml(field), meaning))
    about = (section.__doc__ or "").strip()
    return [((name, about), rows), *below] if rows else below


def _toml(field: msgspec.structs.FieldInfo) -> str:
    value: object = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Size) and value:
        return f'"{_size(value)}"'
    if isinstance(value, str):
        return f'"{value}"'
    return str(int(value)) if isinstance(value, Size) else str(value)


def _size(value: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % factor == 0:
            return f"{value // factor}{unit}"
    return f"{value}B"


def render_file() -> str:
    """Return a whole configuration file: every key, its meaning, and its default."""
    lines = ["# kvpool-server's configuration: every key with its default.", ""]
    for (name, about), rows in _sections(FileSettings, ""):
        is_list = name.endswith("[]")
        mark = "# " if is_list else ""
        header = f"[[{name[:-2]}]]" if is_list else f"[{name}]"
        lines += [f"# {about}", f"{mark}{header}"]
        for row in rows:
            lines.append(f"# {row.meaning}.")
            lines.append(f"{mark}{row.key.split('.')[-1]} = {row.default or _EXAMPLE}")
        lines.append("")
    return "\n".join(lines)


def render_table() -> str:
    """Return the table of ``docs/server.md``, one line a key, in Markdown."""
    lines = ["| key | is | default | meaning |", "|---|---|---|---|"]
    for row in _rows():
        default = f"`{row.default}`" if row.default else "needed"
        lines.append(f"| `{row.key}` | {row.kind} | {default} | {row.meaning} |")
    return "\n".join(lines) + "\n"
