"""The secret that the nodes of a run share: who knows it may join the run, nobody else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rota.errors import UsageError

VARIABLE = "ROTA_SECRET"
_FEWEST_BYTES, _MOST_BYTES = 32, 4096
_MAKE = "make one by `(umask 077; openssl rand -hex 32 > secret)`"


def given_secret(path: str | Path | None) -> bytes:
    """The secret in a file, or without one that of the environment, which no process started later gets.

    Raises:
        UsageError: there is none, it is too short, or others can read or write the file.
    """
    in_environment = os.environ.pop(VARIABLE, None)
    if path is not None:
        return _checked(_read(Path(path)), f"the secret in {path}")
    if in_environment is None:
        raise UsageError(f"several nodes need a secret; {_MAKE}, and give it with --secret-file or in {VARIABLE}")
    return _checked(in_environment.encode(errors="surrogateescape"), f"the secret in {VARIABLE}")


def _read(path: Path) -> bytes:
    try:
        # Not blocking: a pipe must not stop the command.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            of_file = os.fstat(file.fileno())
            if not stat.S_ISREG(of_file.st_mode):
                raise UsageError(f"the secret {path} is not a regular file; {_MAKE}")
            if of_file.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"others may read or write the secret {path}; run `chmod 600 {path}`")
            if of_file.st_uid not in (os.geteuid(), 0):
                raise UsageError(f"the secret {path} belongs to another user; {_MAKE}")
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the secret {path}: {error.strerror}; check the path") from None


def _checked(data: bytes, name: str) -> bytes:
    secret = data.strip()
    if not _FEWEST_BYTES <= len(secret) <= _MOST_BYTES:
        raise UsageError(
            f"{name} has {len(secret)} bytes{' or more' if len(secret) > _MOST_BYTES else ''}; give {_FEWEST_BYTES} "
            f"to {_MOST_BYTES}: {_MAKE}"
        )
    return secret
