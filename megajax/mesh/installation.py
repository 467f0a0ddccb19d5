"""Installed versions of jax, its CUDA plugin and NVIDIA's libraries, and problems with them; imports none of them."""

import ctypes.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from megajax.config.missing import install

LEAST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> of the driver that runs it (NVIDIA, "CUDA Compatibility", minor version compatibility)."""
LEAST_CAPABILITY = {12: (5, 0), 13: (7, 5)}
"""Major version of CUDA -> least compute capability it compiles for (CUDA 13.0 release notes: Volta and older left)."""
EXTRA = "cuda{}"
"""Of MegaJAX, with the plugin for a major version of CUDA."""
LIBRARIES = {"cudnn": "cuDNN", "cublas": "cuBLAS", "nccl": "NCCL"}
"""Module below `nvidia` -> what people call the library; also that of its file, libcudnn.so."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Of this machine, as found."""

    gpus: int
    """NVIDIA GPUs the driver shows."""
    driver: tuple[int, ...] | None
    """Version of the driver; None: none is loaded."""
    packages: Mapping[str, str]
    """Name -> version of what is installed of jax: jax, jaxlib, jax-cuda12-plugin, ..."""
    libraries: frozenset[str]
    """Keys of LIBRARIES that are there, as a package or on the system."""

    @property
    def cuda(self) -> list[int]:
        """Major versions of CUDA there are plugins for."""
        return [major for major in LEAST_DRIVER if f"jax-cuda{major}-plugin" in self.packages]

    def faults(self) -> list[str]:
        """What keeps GPUs from being used: found, needed and what to do, a paragraph each."""
        return [text for check in (self._plugin, self._versions, self._driver, self._libraries) for text in check()]

    def _plugin(self) -> list[str]:
        if len(self.cuda) > 1:
            return [
                "two CUDA plugins of jax are installed, for CUDA 12 and for CUDA 13; one is needed:\n"
                "  pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
            ]
        if self.cuda or not self.gpus:
            return []
        fits = max((major for major, least in LEAST_DRIVER.items() if (self.driver or (0,))[0] >= least), default=12)
        count = f"{self.gpus} NVIDIA GPU{'s' * (self.gpus > 1)}"
        return [f"{count} found, but no CUDA plugin of jax; to use them install it:\n  {install(EXTRA.format(fits))}"]

    def _versions(self) -> list[str]:
        wanted = self.packages.get("jaxlib")
        other = [f"{name} {there}" for name, there in sorted(self.packages.items()) if there != wanted]
        if not other or not self.cuda or wanted is None:
            return []
        return [
            f"parts of jax are of different versions: jaxlib {wanted}, but {', '.join(other)}; all must be the same:\n"
            f"  {install(EXTRA.format(self.cuda[0]))}"
        ]

    def _driver(self) -> list[str]:
        if not self.cuda:
            return []
        major, least = self.cuda[0], LEAST_DRIVER[self.cuda[0]]
        if self.driver is None:
            return [
                f"no NVIDIA driver is loaded (there is no /proc/driver/nvidia/version); CUDA {major} needs {least} or "
                "newer. In a container, start it with its GPUs (docker run --gpus all)."
            ]
        if self.driver[0] < least:
            shown = ".".join(map(str, self.driver))
            older = " or use the extra cuda12" if major == 13 and self.driver[0] >= LEAST_DRIVER[12] else ""
            return [f"the NVIDIA driver is {shown}; CUDA {major} needs {least} or newer. Install one{older}."]
        return []

    def _libraries(self) -> list[str]:
        missing = [words for name, words in LIBRARIES.items() if name not in self.libraries]
        if not self.cuda or not missing:
            return []
        return [f"not found: {', '.join(missing)}; they come with\n  {install(EXTRA.format(self.cuda[0]))}"]

    def capability_fault(self, name: str, actual: tuple[int, int]) -> str:
        """Why a GPU called `name` of compute capability `actual` is too old, or ""."""
        least = LEAST_CAPABILITY.get(self.cuda[0], (0, 0)) if self.cuda else (0, 0)
        if actual >= least:
            return ""
        wanted, there = (".".join(map(str, pair)) for pair in (least, actual))
        return f"{name} has compute capability {there}; jax for CUDA {self.cuda[0]} needs {wanted} or newer"


def look(devices: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia/version")) -> Installation:
    """See what is there; some 20 ms."""
    text = driver.read_text(errors="replace") if driver.is_file() else ""
    match = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+(?:\.\d+)+)", text)
    return Installation(
        gpus=len(list(devices.glob("nvidia[0-9]*"))),
        driver=tuple(map(int, match[1].split("."))) if match else None,
        packages=_packages(),
        libraries=frozenset(name for name in LIBRARIES if _there(name)),
    )


def _packages() -> dict[str, str]:
    names = ["jax", "jaxlib", *(f"jax-cuda{major}-{part}" for major in LEAST_DRIVER for part in ("plugin", "pjrt"))]
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _there(library: str, search: Callable[[str], str | None] = ctypes.util.find_library) -> bool:
    try:
        packaged = find_spec(f"nvidia.{library}") is not None
    except ModuleNotFoundError:  # of the package around it
        packaged = False
    return packaged or search(library) is not None
