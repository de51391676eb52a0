"""Signatures of bundles (Ed25519 [RFC 8032]), and the public keys that are trusted."""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from autotune.errors import KnowledgeError
from storage.folder import default_file
from storage.private_files import make_private_folder, write_private

FOLDER = "AUTOTUNE_KEYS"
"""Environment variable: the folder of the own private key and of the trusted public keys."""
_NEW_KEY = "make one with: ssh-keygen -t ed25519 -N '' -f FILE"


def key_folder() -> Path:
    """The folder of the keys: private to the user."""
    return Path(os.environ.get(FOLDER) or default_file().parent / "keys")


def own_key(path: Path | None) -> Ed25519PrivateKey:
    """The private key of a file, of ssh-keygen or in PEM; None: the user's own, which is made when it is first needed.

    Raises:
        KnowledgeError: the file cannot be read, or holds no such key.
    """
    file = path or key_folder() / "own_key.pem"
    try:
        if path is None and not file.exists():
            make_private_folder(file.parent)
            made = Ed25519PrivateKey.generate()
            write_private(file, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())
        data = file.read_bytes()
    except OSError as error:
        raise KnowledgeError("key", f"{file} cannot be read ({error.strerror})", _NEW_KEY) from error
    try:
        key = load_ssh_private_key(data, None) if b"OPENSSH" in data else load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KnowledgeError("key", f"{file} is not a private key without a passphrase", _NEW_KEY) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KnowledgeError("key", f"{file} is not an Ed25519 key", _NEW_KEY)
    return key


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The 32 bytes of the public key."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def read_public_key(path: Path) -> bytes:
    """The 32 bytes of a public key: a .pub file of ssh-keygen, PEM, or base64 as in a bundle.

    Raises:
        KnowledgeError: the file cannot be read, or holds no such key.
    """
    try:
        data = path.read_bytes().strip()
    except OSError as error:
        raise KnowledgeError("key", f"{path} cannot be read ({error.strerror})", "give the file of a public key") from error
    key: object
    try:
        if data.startswith(b"ssh-"):
            key = load_ssh_public_key(data)
        elif data.startswith(b"-----"):
            key = load_pem_public_key(data)
        else:
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(data, validate=True))
    except (ValueError, UnsupportedAlgorithm, binascii.Error):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise KnowledgeError("key", f"{path} is not an Ed25519 public key", "give a .pub file of `ssh-keygen -t ed25519`")
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def fingerprint(key: bytes) -> str:
    """16 hexadecimal digits that identify a public key."""
    return hashlib.sha256(key).hexdigest()[:16]


def is_signed_by(key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the signature of the message is by the owner of the public key."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def trusted_keys() -> Mapping[bytes, str]:
    """Public key -> the name that the user recorded it by. The user's own key is one of them, if there is one.

    Raises:
        KnowledgeError: a line of the file is damaged.
    """
    found: dict[bytes, str] = {}
    if (key_folder() / "own_key.pem").exists():
        found[public_bytes(own_key(None))] = "own key"
    file = _trusted_file()
    if not file.exists():
        return found
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text, _, name = line.strip().partition(" ")
        if not text:
            continue
        try:
            key = base64.b64decode(text, validate=True)
        except binascii.Error:
            key = b""
        if len(key) != 32:
            raise KnowledgeError(f"{file}:{number}", "is not a base64 key and a name", "correct or remove the line")
        found[key] = name
    return found


def record_trusted(key: bytes, name: str) -> None:
    """Trust the key from now on."""
    if key in trusted_keys():
        return
    file = _trusted_file()
    make_private_folder(file.parent)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{base64.b64encode(key).decode()} {' '.join(name.split())}\n")


def _trusted_file() -> Path:
    return key_folder() / "trusted_keys"
