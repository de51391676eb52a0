"""Encryption of stored secrets: someone with the database or a backup cannot sign as this service.

The key is not in the database, but in AUTOTUNE_SECRET_KEY, in the file that AUTOTUNE_SECRET_KEY_FILE names, or else in a
private file that is created on demand: NAME.key next to an SQLite file, and for a server `secret.key` in the folder of the
default database. Processes on several machines need the same key.
"""

import contextlib
import os
import re
import threading
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import URL

from storage.errors import SecretError
from storage.private_files import default_file, make_private_folder, write_private

KEYS_VARIABLE = "AUTOTUNE_SECRET_KEY"
"""Fernet keys, separated by commas: the first one encrypts, all can decrypt, so that keys can be rotated."""
FILE_VARIABLE = "AUTOTUNE_SECRET_KEY_FILE"
"""A file with the keys."""


class SecretBox:
    """Encrypts and decrypts with the keys of one database, which are loaded on demand. Thread-safe."""

    _SEALED = "fernet:"

    def __init__(self, address: URL) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._keys: tuple[str, ...] = ()

    def seal(self, secret: str) -> str:
        """Return the encrypted secret.

        Raises:
            SecretError: there is no key, and none can be created.
        """
        return self._SEALED + self._cipher(make=True).encrypt(secret.encode()).decode()

    def open(self, stored: str) -> str:
        """Decrypt a secret from `seal`.

        Raises:
            SecretError: no key decrypts it.
        """
        try:
            return self._cipher(make=False).decrypt(stored.removeprefix(self._SEALED).encode()).decode()
        except InvalidToken:
            problem = f"a secret was encrypted with another key than {self._place()} has"
            raise SecretError(f"{problem}; also give the former key, after a comma") from None

    def _cipher(self, make: bool) -> MultiFernet:
        with self._lock:
            self._keys = self._keys or self._found(make)
            try:
                return MultiFernet([Fernet(key) for key in self._keys])
            except ValueError:
                remedy = "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"
                raise SecretError(f"{self._place()}: holds no key; make one with {remedy}") from None

    def _found(self, make: bool) -> tuple[str, ...]:
        if text := os.environ.get(KEYS_VARIABLE):
            return _split(text)
        file = self._file()
        if make and FILE_VARIABLE not in os.environ and not file.exists():
            self._make(file)
        try:
            return _split(file.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "is not text"
            raise SecretError(f"{file}: cannot be read ({why}); give the key in {KEYS_VARIABLE} or {FILE_VARIABLE}") from None

    def _make(self, file: Path) -> None:
        try:
            make_private_folder(file.parent)
            with contextlib.suppress(FileExistsError):  # another process has created it meanwhile
                write_private(file, Fernet.generate_key().decode() + "\n")
        except OSError as error:
            raise SecretError(f"{file}: cannot be made ({error.strerror}); give a key in {KEYS_VARIABLE}") from None

    def _file(self) -> Path:
        if key_file := os.environ.get(FILE_VARIABLE):
            return Path(key_file)
        if self._address.get_backend_name() == "sqlite":
            return Path(f"{self._address.database}.key")
        return default_file().with_name("secret.key")

    def _place(self) -> str:
        return KEYS_VARIABLE if os.environ.get(KEYS_VARIABLE) else str(self._file())


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,\s]+", text) if part)
