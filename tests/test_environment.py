"""environment.yml and constraints.txt say nothing that pyproject.toml does not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


def conda_environment() -> tuple[list[str], list[str]]:
    """The conda packages and the pip arguments that environment.yml names."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = [argument for item in listed if isinstance(item, dict) for argument in item["pip"]]
    return [item for item in listed if isinstance(item, str)], pip


def direct_requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    return [
        requirement
        for requirement in map(Requirement, texts)
        if requirement.name != PROJECT["name"]
    ]


def test_conda_brings_python_and_pip_and_nothing_else() -> None:
    packages, _ = conda_environment()
    assert [re.split(r"[=<> ]", package)[0] for package in packages] == ["python", "pip"]


def test_conda_python_is_one_the_package_allows() -> None:
    packages, _ = conda_environment()
    version = packages[0].split("=")[1]
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")


def test_pip_in_the_conda_environment_installs_this_project_under_the_lock() -> None:
    _, pip = conda_environment()
    assert pip[0] == "-c constraints.txt"
    (project,) = pip[1:]
    extra = re.fullmatch(r"-e \.\[(\w+)\]", project)
    assert extra is not None, project
    assert extra.group(1) in PROJECT["optional-dependencies"]


def test_all_is_the_sum_of_the_other_extras() -> None:
    # Node is installed only where the machine has none.
    (line,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(line).extras == set(PROJECT["optional-dependencies"]) - {"all", "node"}


def test_the_base_install_needs_one_library() -> None:
    assert [Requirement(text).name for text in PROJECT["dependencies"]] == ["click"]


def test_each_line_of_the_lock_is_one_exact_version() -> None:
    # No path, no address, no local build such as "+cpu": the lock must fit every machine.
    assert PINS
    assert not [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]


def test_the_lock_pins_torch_once_and_leaves_triton_to_torch() -> None:
    names = [canonicalize_name(line.split("==")[0]) for line in PINS]
    assert names.count("torch") == 1
    assert len(names) == len(set(names))
    assert not {"triton", "pip", "setuptools", PROJECT["name"]} & set(names)


def test_the_lock_satisfies_every_requirement() -> None:
    pinned = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in PINS}
    for requirement in direct_requirements():
        if requirement.name == "triton":
            continue
        assert canonicalize_name(requirement.name) in pinned, f"{requirement} is not in the lock"
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_torch_has_its_exact_version_in_the_lock_alone() -> None:
    exact = re.compile(r"torch\s*==\s*\d")
    files = [ROOT / "pyproject.toml", ROOT / "environment.yml", ROOT / "Makefile"]
    assert not [path.name for path in files if exact.search(path.read_text())]
