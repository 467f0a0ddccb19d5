"""The installed versions of jax, its CUDA plugin and NVIDIA's libraries, and their faults; imports none of them."""

import ctypes.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from megajax.config.optional_packages import install
from megajax.processes.gpus import installed_gpus

MINIMUM_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> minimum driver version (NVIDIA, "CUDA Compatibility", minor version compatibility)."""
MINIMUM_CAPABILITY = {12: (5, 0), 13: (7, 5)}
"""Major version of CUDA -> minimum compute capability (CUDA 13.0 release notes drop Volta and older)."""
EXTRA = "cuda{}"
"""The extra of MegaJAX with the plugin for a major version of CUDA."""
LIBRARIES = {"cudnn": "cuDNN", "cublas": "cuBLAS", "nccl": "NCCL"}
"""Module below `nvidia`, also the name of the library's file -> name of the library."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is installed on this machine."""

    gpus: int
    """Number of NVIDIA GPUs that the driver shows."""
    driver: tuple[int, ...] | None
    """Version of the driver; None: not loaded."""
    packages: Mapping[str, str]
    """Name -> version of the installed packages of jax: jax, jaxlib, jax-cuda12-plugin, ..."""
    libraries: frozenset[str]
    """Keys of LIBRARIES that are installed, as a package or on the system."""

    @property
    def cuda(self) -> list[int]:
        """Major versions of CUDA with an installed plugin."""
        return [major for major in MINIMUM_DRIVER if f"jax-cuda{major}-plugin" in self.packages]

    def faults(self) -> list[str]:
        """Reasons why GPUs can't be used, each with what to do."""
        return [text for check in (self._plugin, self._versions, self._driver, self._libraries) for text in check()]

    def _plugin(self) -> list[str]:
        if len(self.cuda) > 1:
            return [
                "two CUDA plugins of jax are installed, for CUDA 12 and for CUDA 13; one is needed:\n"
                "  pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
            ]
        if self.cuda or not self.gpus:
            return []
        driver = (self.driver or (0,))[0]
        fits = max((major for major, minimum in MINIMUM_DRIVER.items() if driver >= minimum), default=12)
        count = f"{self.gpus} NVIDIA GPU{'s' * (self.gpus > 1)}"
        return [f"{count} found, but no CUDA plugin of jax; to use them install it:\n  {install(EXTRA.format(fits))}"]

    def _versions(self) -> list[str]:
        jaxlib = self.packages.get("jaxlib")
        mismatched = [f"{name} {version}" for name, version in sorted(self.packages.items()) if version != jaxlib]
        if not mismatched or not self.cuda or jaxlib is None:
            return []
        return [
            f"jax's packages have different versions: jaxlib {jaxlib}, {', '.join(mismatched)}; install one version:\n"
            f"  {install(EXTRA.format(self.cuda[0]))}"
        ]

    def _driver(self) -> list[str]:
        if not self.cuda:
            return []
        major, minimum = self.cuda[0], MINIMUM_DRIVER[self.cuda[0]]
        if self.driver is None:
            return [
                f"no NVIDIA driver is loaded (there is no /proc/driver/nvidia/version); CUDA {major} needs {minimum} "
                "or newer. In a container, start it with its GPUs (docker run --gpus all)."
            ]
        if self.driver[0] < minimum:
            version = ".".join(map(str, self.driver))
            older = " or use the extra cuda12" if major == 13 and self.driver[0] >= MINIMUM_DRIVER[12] else ""
            return [f"the NVIDIA driver is {version}; CUDA {major} needs {minimum} or newer. Install one{older}."]
        return []

    def _libraries(self) -> list[str]:
        missing = [description for name, description in LIBRARIES.items() if name not in self.libraries]
        if not self.cuda or not missing:
            return []
        return [f"not found: {', '.join(missing)}; they come with\n  {install(EXTRA.format(self.cuda[0]))}"]

    def capability_fault(self, name: str, actual: tuple[int, int]) -> str:
        """Why a GPU of compute capability `actual` is too old, or ""; name: of the GPU."""
        minimum = MINIMUM_CAPABILITY.get(self.cuda[0], (0, 0)) if self.cuda else (0, 0)
        if actual >= minimum:
            return ""
        needed, version = (".".join(map(str, pair)) for pair in (minimum, actual))
        return f"{name} has compute capability {version}; jax for CUDA {self.cuda[0]} needs {needed} or newer"


def find_installation(devices: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia/version")) -> Installation:
    """Inspects this machine, in about 20 ms."""
    text = driver.read_text(errors="replace") if driver.is_file() else ""
    match = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+(?:\.\d+)+)", text)
    return Installation(
        gpus=len(installed_gpus(devices)),
        driver=tuple(map(int, match[1].split("."))) if match else None,
        packages=jax_packages(),
        libraries=frozenset(name for name in LIBRARIES if _installed(name)),
    )


def jax_packages() -> dict[str, str]:
    """Name -> version of the installed packages of jax."""
    names = ["jax", "jaxlib", *(f"jax-cuda{major}-{part}" for major in MINIMUM_DRIVER for part in ("plugin", "pjrt"))]
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _installed(library: str, search: Callable[[str], str | None] = ctypes.util.find_library) -> bool:
    try:
        packaged = find_spec(f"nvidia.{library}") is not None
    except ModuleNotFoundError:  # of the parent package
        packaged = False
    return packaged or search(library) is not None
