"""Takes the speed or the room of a disk until standard input ends. ``python -I -S disk_hog.py slow|full FOLDER``.

Its files have no name, so that whatever ends it frees what it took. It says ``ok`` once it has begun: ``full`` when
the first byte was refused, ``slow`` when every writer has synced once.
"""

import errno
import os
import select
import sys
import threading

_STEPS = (1 << 30, 1 << 26, 1 << 20, 1 << 12)
_WRITERS = 8
_BLOCK = bytes(1 << 20)
_BLOCKS = 16
_AGAIN_S = 0.05


def _nameless(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # a file system without them
        path = os.path.join(folder, f".hog-{os.getpid()}-{threading.get_ident()}")  # noqa: PTH118
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.unlink(path)  # noqa: PTH108
        return fd


def _is_over(wait_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def _full(folder: str) -> None:
    """Take all that is left, and what becomes free, again and again."""
    fd, size, has_said = _nameless(folder), 0, False
    while True:
        for step in _STEPS:
            while True:
                try:
                    os.posix_fallocate(fd, size, step)
                except OSError as err:
                    if err.errno not in {errno.ENOSPC, errno.EDQUOT}:
                        raise
                    break
                size += step
                if _is_over(0):
                    return
        if not has_said:
            has_said = True
            print("ok", size, flush=True)
        if _is_over(_AGAIN_S):
            return


def _slow(folder: str) -> None:
    """Write and sync from several threads at once, in files that don't grow beyond a few MiB."""
    stop = threading.Event()
    begun = threading.Barrier(_WRITERS + 1)

    def write() -> None:
        try:
            fd, number = _nameless(folder), 0
            while not stop.is_set():
                os.pwrite(fd, _BLOCK, (number % _BLOCKS) * len(_BLOCK))
                os.fdatasync(fd)
                number += 1
                if number == 1:
                    begun.wait()
        except OSError:
            begun.abort()  # a disk without room, for one

    for _ in range(_WRITERS):
        threading.Thread(target=write, daemon=True).start()
    begun.wait()
    print("ok", flush=True)
    while not _is_over(1.0):
        pass
    stop.set()


def main() -> int:
    """0 once standard input has ended, 1 with a sentence where the disk won't have it."""
    how, folder = sys.argv[1:]
    try:
        (_full if how == "full" else _slow)(folder)
    except OSError as err:
        print(err, flush=True)
        return 1
    except threading.BrokenBarrierError:
        print("it takes no writes", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
