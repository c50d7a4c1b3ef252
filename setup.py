"""Compiles the C library while the package is built. All else about the package is in pyproject.toml."""

import runpy
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src/everystep/native")
LIBRARY = Extension(
    "everystep.native._replay",
    sources=sorted(map(str, NATIVE.glob("*.c"))),
    depends=sorted(map(str, NATIVE.glob("*.h"))),
    optional=True,  # without a compiler the package installs all the same, and torch replays
)


class BuildLibrary(build_ext):
    """The library is plain C, so it has neither an interpreter's name nor an interpreter's flags."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # by its path: the package itself needs numpy, which an isolated build does not have
        build = runpy.run_path(str(NATIVE / "build.py"))["build"]
        try:
            build(target)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(str(error)) from error


class TagWheel(bdist_wheel):
    """One wheel serves every Python 3: ctypes loads the library. Without one it serves every machine."""

    def get_tag(self):
        compiled = any(Path(self.bdist_dir).rglob("_replay.so"))
        return ("py3", "none", super().get_tag()[2] if compiled else "any")


setup(ext_modules=[LIBRARY], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel})
