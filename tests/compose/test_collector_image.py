"""The collector's image: what is in it and what is not, and that it stays below its limit."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "compose" / "Dockerfile").read_text(encoding="utf-8")
HEAVY = {
    "numpy",
    "torch",
    "pandas",
    "scipy",
    "grpcio",
    "kubernetes",
    "faust-streaming",
    "pyarrow",
    "chdb",
    "nvidia-ml-py",
}


def image_size() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_size", ROOT / "compose" / "image_size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def closure(requirements: list[str]) -> set[str]:
    """Every distribution that these need, by the metadata of what is installed here."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        need, extra = waiting.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name in found:
            continue
        found.add(name)
        waiting += [(Requirement(text), "") for text in metadata.requires(name) or []]
        waiting += [(Requirement(text), each) for each in need.extras for text in metadata.requires(name) or []]
    return found


def needed() -> set[str]:
    return closure(PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["collector"])


def test_neither_numpy_nor_torch_nor_anything_of_their_weight_comes_with_the_collector() -> None:
    names = needed()
    assert {"msgspec", "typer", "kafka-python"} <= names
    assert names & HEAVY == set()
    assert HEAVY & closure(PROJECT["project"]["optional-dependencies"]["streams"]), "the walk finds them where they are"


def test_the_image_is_built_from_the_collectors_extra_and_nothing_more() -> None:
    stage = DOCKERFILE.partition("AS collector-site")[2].partition("FROM base AS worker")[0]
    assert re.findall(r'"/src\[(.*?)\]"', stage) == ["collector"]
    assert "FROM debian:bookworm-slim AS collector\n" in stage
    assert "--no-compile" in stage
    installed = re.search(r"apt-get install --yes --no-install-recommends ([\w\- ]+?) &&", stage)
    assert installed is not None
    assert set(installed.group(1).split()) <= set(image_size().PACKAGES_KIB), "its size is not counted"


def test_the_image_is_below_its_limit() -> None:
    sizes = image_size()
    site = sum(
        path.stat().st_size
        for name in needed()
        for file in metadata.files(name) or []
        if file.suffix != ".pyc" and (path := Path(str(file.locate()))).is_file()
    )
    ours = sum(
        sizes.tree_bytes(ROOT / package)
        for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    assert site > 10_000_000, "the metadata names the files of what is installed"
    assert sizes.image_bytes(site + ours) < sizes.LIMIT_BYTES


def test_a_tree_is_summed_without_bytecode_and_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_bytes(b"1" * 1000)
    (tmp_path / "a" / "x.pyc").write_bytes(b"1" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "x.py")
    assert 1000 < image_size().tree_bytes(tmp_path) < 1400
