"""A wheel has in cog_triton/root what stands at the top of a checkout."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = ("predict.py", "cog.yaml", "triton_model_repo")


class Build(build_py):
    """Copy it, but not for an editable installation, which is the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "cog_triton", "root")
            for name in ROOT:
                for file in [Path(name), *Path(name).rglob("*")]:
                    if file.is_file() and "__pycache__" not in file.parts:
                        self.mkpath(str((target / file).parent))
                        self.copy_file(str(file), str(target / file))


setup(cmdclass={"build_py": Build})
