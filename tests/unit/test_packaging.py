"""What is published: one version, names that are true, and a wheel that an index takes."""

import re
import sys
from pathlib import Path

import yaml

import cog_triton
from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_stated_once_and_the_chart_follows_it() -> None:
    assert PROJECT["dynamic"] == ["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == cog_triton.__version__
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    versions = set(re.findall(r"cog_triton-([\d.]+)-py3", text))
    assert versions <= {cog_triton.__version__}


def test_the_pythons_of_the_classifiers_are_those_that_install() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [int(name.removeprefix(prefix)) for name in PROJECT["classifiers"] if prefix in name]
    assert PROJECT["requires-python"] == f">=3.{min(minors)}"
    assert minors == list(range(min(minors), max(minors) + 1))


def test_extras_that_commands_name_exist() -> None:
    sources = "".join(
        file.read_text(encoding="utf-8") for file in Path(cog_triton.__file__).parent.rglob("*.py")
    )
    named = set(re.findall(r"cog-triton\[([\w-]+)\]", sources))
    assert "vllm" in named
    assert named <= PROJECT["optional-dependencies"].keys()
