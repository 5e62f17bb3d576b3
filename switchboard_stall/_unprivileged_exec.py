"""Replaces itself with a PostgreSQL program, as somebody other than root, and ends with its parent.

Run as a script, isolated (``python -I -S``), with the parent's process id, the launcher's folder, and
the program with its arguments. It is a program of its own because Python between
``fork`` and ``exec`` can deadlock in a parent with threads.
"""

import ctypes
import os
import pwd
import signal
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1
OVERFLOW_ID = 65534

HANDED_OVER = ("pgdata", "pgdata.new", "password")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_user_namespace() -> None:
    """Keep root's files and lose root's powers: the same user, under another number, in its own namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    _checked(libc.unshare(CLONE_NEWUSER), "unshare")
    # The kernel takes a gid map only after setgroups is given up, or from the parent namespace.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{OVERFLOW_ID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{OVERFLOW_ID} {gid} 1")


def become_nobody(folder: Path, program: Path) -> None:
    """Hand the launcher's files, and no others in the folder, to the user nobody, and become that user."""
    nobody = pwd.getpwnam("nobody")
    for own in (folder / name for name in HANDED_OVER):
        # Only what is still root's: in a tree that nobody can write to, root must follow no path.
        if own.exists() and own.lstat().st_uid == 0:
            for path in (own, *own.rglob("*")):
                os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
    for path in (folder, program):
        if not os.access(path, os.X_OK):
            raise PermissionError(f"{str(path)!r} is closed to that user, or a folder above it is")


def leave_root(folder: Path, program: Path) -> None:
    """Make the effective user somebody other than root, or exit with the reason each way failed."""
    try:
        enter_user_namespace()
        return
    except OSError as error:
        namespace_error = error
    try:
        become_nobody(folder, program)
    except (OSError, KeyError) as error:
        sys.exit(
            "PostgreSQL refuses to run as root, and root could not be left:"
            f" no user namespace ({namespace_error}), and not the user nobody ({error})."
            " Start this program as an ordinary user."
        )


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGINT, PostgreSQL's fast shutdown, when the parent dies."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0), "prctl")
    # The parent may have died before the call above.
    if os.getppid() != parent:
        sys.exit("the parent process ended")


def main() -> None:
    """Leave root where needed, tie this process to its parent, run the program."""
    parent, folder, program = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    if os.geteuid() == 0:
        leave_root(folder, program)
    # Last: a change of user clears the signal.
    end_with_parent(parent)
    os.execv(program, sys.argv[3:])


if __name__ == "__main__":
    main()
