"""Become a bash that starts no program: `python -I confined_bash.py FOLDER ARGUMENT…`.

A filter of system calls (seccomp) stays with the process and all its children. It refuses to start programs, to send
signals, to open sockets and to leave the process group. Where the kernel has Landlock, files are written in FOLDER
alone; elsewhere bash does not overwrite files (noclobber). This file needs the standard library only.
"""

import ctypes
import os
import resource
import shutil
import struct
import sys

REFUSED_CALLS = {"x86_64": (59, 62, 41, 109, 112), "aarch64": (221, 129, 198, 154, 157)}
"""Machine -> numbers of execve, kill, socket, setpgid, setsid. execveat, which bash never calls, starts bash itself."""
WRITE_FILE, MAKE_FILE = 1 << 1, 1 << 8
"""Landlock's bits."""
LIMITS = {"CPU": 10, "FSIZE": 2**20, "AS": 2**30, "NPROC": 256, "CORE": 0}
"""Of each process: seconds, bytes of a file, bytes of memory. NPROC: processes, in addition to those of today."""
NO_FILTER = 97
"""Exit status without a filter of system calls."""


def refuse_calls(libc: ctypes.CDLL) -> bool:
    """Install the filter. False: this machine or its kernel has none."""
    system = os.uname()
    calls = REFUSED_CALLS.get(system.machine, ()) if system.sysname == "Linux" else ()
    # Load the number of the call; if it is in the list, go to the last line; allow; fail with EACCES.
    lines = [(0x20, 0, 0, 0), *((0x15, len(calls) - place, 0, call) for place, call in enumerate(calls))]
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 13)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    return bool(calls) and libc.prctl(22, 2, program, 0, 0) == 0


def confine_writes(libc: ctypes.CDLL, folder: str) -> bool:
    """Allow writing in the folder and to /dev/null alone. False: the kernel has no Landlock."""
    handled = ctypes.c_uint64(WRITE_FILE | MAKE_FILE)
    rules = libc.syscall(444, ctypes.byref(handled), 8, 0)
    for path, rights in ((folder, WRITE_FILE | MAKE_FILE), (os.devnull, WRITE_FILE)):
        libc.syscall(445, rules, 1, struct.pack("=Qi", rights, os.open(path, os.O_RDONLY)), 0)
    return rules >= 0 and libc.syscall(446, rules, 0) == 0


def main(folder: str, *arguments: str) -> None:
    """Set limits and replace this process."""
    bash = os.open(shutil.which("bash", path=os.defpath) or "/bin/bash", os.O_RDONLY)
    with open("/proc/loadavg") as file:
        processes = int(file.read().split()[3].partition("/")[2])
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which neither can be installed
    options = [] if confine_writes(libc, folder) else ["-C"]
    if not refuse_calls(libc):
        sys.exit(NO_FILTER)
    for name, limit in LIMITS.items():
        most = limit + processes * (name == "NPROC")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    os.execve(bash, ["bash", *options, *arguments], os.environ)


if __name__ == "__main__":
    main(*sys.argv[1:])
