"""``kvpool fsck``: checks the store of an SSD tier, says what is wrong, and mends it if asked.

Owns arguments and output; the checking is in ``kvpool.tiers.ssd_fsck``. Who calls it: ``kvpool``.
"""

import argparse
from pathlib import Path
from typing import Final

import msgspec

from kvpool.tiers.ssd_fsck import Report, check_store

DESCRIPTION: Final = (
    "Read every slot of an SSD tier's folder and report what is damaged. The tier must be closed. "
    "Exit status: 0 if nothing is wrong or everything was mended, 1 if something is, 2 if the store "
    "cannot be checked."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvpool fsck``."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the SSD tier's folder")
    parser.add_argument(
        "--repair", action="store_true", help="erase damaged blocks and give files their size"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check and print; return the exit status."""
    report = check_store(arguments.folder, mend=arguments.repair)
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        _tell(report)
    return 1 if any(not finding.mended for finding in report.findings) else 0


def _tell(report: Report) -> None:
    for finding in report.findings:
        mended = " (mended)" if finding.mended else ""
        print(f"{finding.kind:<11} {finding.where} {finding.meaning}{mended}")
    closed = "closed in order" if report.clean else "not closed in order: opens by its headers"
    print(
        f"{report.blocks} whole blocks in {report.slots} slots, {len(report.findings)} findings; "
        f"{closed}"
    )
