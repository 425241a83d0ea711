"""A key for this node and the request to have it signed, made by a process of its own: `python -m node.signing_request FOLDER`.

Writes FOLDER/key.pem (0600) and prints the request (PEM). Needed once in a node's life; in the daemon it would cost 8 MB for all of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def main() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    new = Path(sys.argv[1], "key.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(pem)
    new.replace(new.with_suffix(".pem"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])  # the coordinator chooses the real one
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    print(request.public_bytes(serialization.Encoding.PEM).decode())


if __name__ == "__main__":
    main()
