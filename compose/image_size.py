"""How large the collector's image is, without a builder: its installed tree, summed, on a base whose size is published.

    python compose/image_size.py                # installs the collector into a fresh folder, as the Dockerfile does, and sums it
    python compose/image_size.py --site FOLDER  # sums a folder in which that was done

Ends with code 1 above the limit. Megabytes are millions of bytes, unpacked, as `docker images` counts.
"""

# ruff: noqa: T201 - it is a command
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES = 150_000_000
BASE_BYTES = 75_000_000
"""debian:bookworm-slim for amd64, unpacked, as its publishers' listings round it (28 MB to be pulled); no builder ran here to weigh it."""
PACKAGES_KIB = {
    "python3": 81, "python3-minimal": 111, "python3.11": 651, "python3.11-minimal": 6743, "libpython3-stdlib": 27,
    "libpython3.11-stdlib": 8334, "libpython3.11-minimal": 5232, "ca-certificates": 388, "openssl": 2315, "libssl3": 6042,
    "media-types": 92, "libsqlite3-0": 1682, "libreadline8": 475, "readline-common": 89, "libncursesw6": 412, "libexpat1": 414,
    "libffi8": 68, "libtirpc3": 226, "libtirpc-common": 35, "libnsl2": 127, "libgssapi-krb5-2": 425, "libkrb5-3": 1077,
    "libk5crypto3": 261, "libkrb5support0": 134, "libkeyutils1": 40,
}  # fmt: skip
"""What the Dockerfile's apt-get adds to the base: Installed-Size of Debian 12's package lists. Some of them are in the base already: the
sum is rather too large than too small."""
UNPACKED = {".pyc"}
"""Endings that the image has not: PYTHONDONTWRITEBYTECODE and --no-compile."""


def install(folder: Path) -> None:
    """As in the stage `collector-site`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder)]
    subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[collector]"], check=True)


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, links not followed."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1] not in UNPACKED
    )


def image_bytes(site_bytes: int) -> int:
    """Of the whole image."""
    return BASE_BYTES + packages_bytes() + site_bytes


def packages_bytes() -> int:
    """Of Debian's Python and what it needs."""
    return sum(PACKAGES_KIB.values()) * 1024


def main() -> int:
    """Print the parts and the sum."""
    parser = argparse.ArgumentParser(description="estimate the size of the collector's image")
    parser.add_argument("--site", type=Path, help="folder in which the collector is installed")
    given: Path | None = parser.parse_args().site
    with tempfile.TemporaryDirectory() as scratch:
        site = given or Path(scratch)
        if given is None:
            install(site)
        site_bytes = tree_bytes(site)
        parts = {entry.name: tree_bytes(entry) if entry.is_dir() else entry.stat().st_size for entry in site.iterdir()}
    total = image_bytes(site_bytes)
    largest = sorted(parts.items(), key=lambda part: -part[1])[:5]
    print(f"debian:bookworm-slim  {BASE_BYTES / 1e6:6.1f} MB (published)")
    print(f"Debian's Python       {packages_bytes() / 1e6:6.1f} MB (package lists)")
    print(f"our site              {site_bytes / 1e6:6.1f} MB ({', '.join(f'{n} {b / 1e6:.1f}' for n, b in largest)})")
    print(f"image                 {total / 1e6:6.1f} MB, limit {LIMIT_BYTES / 1e6:.0f} MB")
    for name in ("numpy", "torch"):
        if name in parts:
            print(f"{name} is in it: the collector must not need it")
            return 1
    return int(total > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
