"""Prints the device, the versions and the missing optional packages of this machine.

Run:  python benchmarks/device.py [--json=FILE]
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import outcome

OPTIONAL = ("grain", "orbax.checkpoint", "array_record", "tyro", "tensorboardX", "zstandard", "torch", "xprof")
SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]


def main() -> int:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records = sights()
    for name, value in records.items():
        print(f"{name:12} {value}")
    if arguments.json:
        outcome.write_to(arguments.json, records)
    return 0


def sights() -> dict[str, Any]:
    """By name."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    computed = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((128, 128)))) == 128.0**3
    smi = subprocess.run(SMI, capture_output=True, text=True, check=False) if shutil.which(SMI[0]) else None
    return {
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "device_kind": device.device_kind,
        "platform": device.platform,
        "backend": device.client.platform_version.replace("\n", ", "),
        "computes": computed,
        "memory": device.memory_stats(),
        "nvidia_smi": None if smi is None else smi.stdout.strip(),
        "missing": [name for name in OPTIONAL if not _installed(name)],
    }


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
